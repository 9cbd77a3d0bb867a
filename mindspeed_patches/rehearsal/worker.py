"""One rank of a rehearsal, under torchrun: ``worker.py SCRIPT ARGS``.

Puts the stand-ins in their places, CommFuse too if asked, then runs the script as if it had been
started itself, and leaves a record of what happened.  The environment variables
``COMMFUSE_REHEARSAL_RECORDS`` (a folder) and ``COMMFUSE_REHEARSAL_WAY`` (``reference`` or
``commfuse``) are set by :mod:`mindspeed_patches.rehearsal`.
"""

from __future__ import annotations

import os
import platform
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["RECORDS", "WAY", "main"]

RECORDS = "COMMFUSE_REHEARSAL_RECORDS"
WAY = "COMMFUSE_REHEARSAL_WAY"


def main(arguments: Sequence[str]) -> None:
    """Run a script with stand-ins and write the record of this rank."""
    import torch
    import torch_npu

    from mindspeed_patches.rehearsal import devices, gloo_for_hccl, mindspeed_ops, npu_runtime
    from mindspeed_patches.rehearsal.npu_ops import register_cpu_kernels
    from mindspeed_patches.rehearsal.observe import Observer
    from mindspeed_patches.rehearsal.records import Record

    folder = Path(os.environ[RECORDS])
    record = Record(
        rank=int(os.environ["RANK"]),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_npu": torch_npu.__version__,
        },
    )
    devices.install()
    npu_runtime.install()
    gloo_for_hccl.install()
    register_cpu_kernels()
    # The order of a launch on an NPU: this module has to see torch.npu as it will be.
    import torch_npu.contrib.transfer_to_npu

    mindspeed_ops.install()
    observer = Observer(record)
    observer.install()
    if os.environ[WAY] == "commfuse":
        from mindspeed_patches import install

        install()
    script = arguments[0]
    sys.argv = list(arguments)
    # As `python SCRIPT` would have it.
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            raise
    observer.finish()
    record.write(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
