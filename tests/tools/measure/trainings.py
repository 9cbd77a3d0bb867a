"""Fake trainings that print ten iterations at once, or fail in a given way."""

import os
import sys
from pathlib import Path

from commfuse_npu.tools.measure.launches import FORMS, Launches

_CODE = """
import os, signal, sys, time
name, how = sys.argv[1:]
print(name, file=open("started", "a"))
if how == "fails":
    raise OSError("liblcal.so: no such file")
if how == "interrupted":
    os.kill(os.getppid(), signal.SIGINT)
if how in ("hangs", "interrupted"):
    time.sleep(600)
for i in range(1, 5 if how == "short" else 11):
    print(f" iteration {i:8d}/      10 | elapsed time per iteration (ms): {100 + i}.0 | throughput "
          f"per GPU (TFLOP/s/GPU): 1.5 | lm loss: 1.{i}E+01 | grad norm: 2.5 |")
print("sha256 of all weights: " + "a" * 64)
"""


def launched(folder: Path, **ends: str) -> Launches:
    """Four forms, which end as ``ends`` says and append their names to ``started``."""
    (code := folder / "training.py").write_text(_CODE)
    commands = {
        form: [sys.executable, str(code), form.name, ends.get(form.name, "well")]
        for form in FORMS
        if form.name in ("megatron", "fb_overlap", "commfuse", "plain")
    }
    return Launches(commands, folder, os.environ)
