"""A fake training that prints ten iterations at once, or fails in a given way."""

import sys
from pathlib import Path

_CODE = """
import os, signal, sys, time
flags = {"--plain": "plain", "--commfuse-fb-overlap": "fb_overlap", "--no-use-commfuse": "megatron"}
name = next((form for flag, form in flags.items() if flag in sys.argv), "commfuse")
print(name, file=open(os.environ["STARTED"], "a"))
how = dict(one.split("=") for one in os.environ["ENDS"].split()).get(name, "well")
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


def launch(folder: Path, patch, **ends: str) -> str:
    """Its command line; forms end as ``ends`` says and append their names to ``started``."""
    (folder / "training.py").write_text(_CODE)
    patch.setenv("STARTED", str(folder / "started"))
    patch.setenv("ENDS", " ".join(f"{name}={how}" for name, how in ends.items()))
    return f"{sys.executable} {folder / 'training.py'}"
