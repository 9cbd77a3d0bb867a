"""A process ends with its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import ended, wait_for

CHILD = """
import os, time
from commfuse_npu.runtime.child_process import die_with_parent

die_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a signal of Linux")
def test_the_kernel_ends_a_process_when_its_parent_is_killed() -> None:
    start = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {CHILD!r}])"
    command = [sys.executable, "-c", start]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_for(lambda: ended(child))
