"""The doctor as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.tools.doctor.machines import ROOT


def run_doctor(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commfuse_npu.tools.cli", "doctor", *words],
        cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
