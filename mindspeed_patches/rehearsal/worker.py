"""One rank of a rehearsal, under torchrun: ``worker.py SCRIPT ARGS``.

Installs the stand-ins, and CommFuse if requested, then runs the script as if it had been started
directly, and writes a record.  :mod:`mindspeed_patches.rehearsal` sets the environment variables
``COMMFUSE_REHEARSAL_RECORDS`` (a folder) and ``COMMFUSE_REHEARSAL_WAY`` (``reference`` or
``commfuse``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_patches import install, launch

__all__ = ["RECORDS", "WAY", "install_stand_ins", "main"]

RECORDS = "COMMFUSE_REHEARSAL_RECORDS"
WAY = "COMMFUSE_REHEARSAL_WAY"


def install_stand_ins() -> None:
    """Install stand-ins for the device, HCCL and compiled operators, permanently in this process.

    Must be called before MindSpeed and Megatron are imported.
    """
    import torch_npu

    from mindspeed_patches.rehearsal import devices, gloo_for_hccl, mindspeed_ops, npu_runtime
    from mindspeed_patches.rehearsal.npu_ops import register_cpu_kernels

    devices.install()
    npu_runtime.install()
    gloo_for_hccl.install()
    register_cpu_kernels()
    # In the order of a launch on an NPU: this module must see the final torch.npu.
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    mindspeed_ops.install()


def main(command: Sequence[str]) -> None:
    """Run a script with stand-ins and write the record of this rank."""
    from mindspeed_patches.rehearsal.observe import Observer
    from mindspeed_patches.rehearsal.records import Record

    observer = Observer(Record(rank=int(os.environ["RANK"])))

    def prepare() -> None:
        install_stand_ins()
        observer.install()
        if os.environ[WAY] == "commfuse":
            install()

    try:
        launch.main(command, prepare)
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            raise
    observer.finish()
    observer.record.write(Path(os.environ[RECORDS]))


if __name__ == "__main__":
    main(sys.argv[1:])
