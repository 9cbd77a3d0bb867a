"""One rank of a rehearsal, under torchrun: ``rehearsed_rank.py FOLDER WAY SCRIPT ARGS``.

Installs the stand-ins, and CommFuse if requested, runs the script as if it had been started
directly, and writes a record into the folder: losses, gradient norms, collectives, hashes of
weights.  MindSpeed's own patch manager wraps the functions that know these.  The way is
``reference`` or ``commfuse``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from commfuse_npu.overlap.transfers import COLLECTIVES
from mindspeed_patches import install, launch
from mindspeed_patches.patching import Function, around, replaced
from mindspeed_patches.registration import FEATURE, wrap_training
from mindspeed_patches.rehearsal import triton_stand_in
from mindspeed_patches.rehearsal.records import NORM, Record
from mindspeed_patches.state_hashes import TrainedState, optimizer_hash, weight_hashes

_COUNTED = (
    *COLLECTIVES,
    *("all_reduce_coalesced", "reduce", "broadcast", "_all_gather_base", "all_gather_coalesced"),
    *("_reduce_scatter_base", "gather", "scatter", "barrier", "send", "isend"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)
"""Functions of ``torch.distributed``; those that the installed version lacks are skipped."""


def install_stand_ins() -> None:
    """Install stand-ins for the device, HCCL and compiled operators, permanently in this process.

    Must be called before MindSpeed and Megatron are imported.
    """
    import torch_npu

    from mindspeed_patches.rehearsal import devices, gloo_for_hccl
    from mindspeed_patches.rehearsal.npu_ops import install_mindspeed_ops, register_cpu_kernels

    devices.install()
    gloo_for_hccl.install()
    register_cpu_kernels()
    # In the order of a launch on an NPU: this module must see the final torch.npu.
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    install_mindspeed_ops()


class CollectiveCounter:
    """Counts collectives and messages while ``active``, by ``group: function``."""

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[str] = Counter()

    def install(self) -> None:
        """Wrap the functions; modules that imported them earlier keep the originals."""
        for name in filter(functools.partial(hasattr, dist), _COUNTED):
            setattr(dist, name, self._counted(name, getattr(dist, name)))
        # P2POp takes only the function that this module has.
        dist.distributed_c10d.isend = dist.isend

    def _counted(self, name: str, function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return function(*args, **kwargs)
            values = (*args, *kwargs.values())
            groups = (value for value in values if isinstance(value, dist.ProcessGroup))
            group: Any = next(groups, dist.group.WORLD)
            words = group.group_desc.lower().replace("_group", "").replace("_", " ")
            self.counts[f"{words}: {name}"] += 1
            # An emulated collective calls another one: only the outer one counts.
            with replaced(self, active=False):
                return function(*args, **kwargs)

        return call


class Observer(TrainedState):
    """Fills the record of this rank while the script runs."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self._collectives = CollectiveCounter()

    def install(self) -> None:
        """Install before Megatron is imported, and before MindSpeed applies its features."""
        self._collectives.install()
        wrap_training(self.setup_model_and_optimizer_wrapper, self.train_step_wrapper)

    @around
    def train_step_wrapper(self, train_step: Function, *args: Any, **kwargs: Any) -> Any:
        """Record the losses and the gradient norm, the first and the sixth value returned."""
        if not self.record.iterations:
            self.record.before = weight_hashes(self.chunks)
        with replaced(self._collectives, active=True):
            result = train_step(*args, **kwargs)
        self.record.iterations += 1
        for name, value in {**result[0], NORM: result[5]}.items():
            if value is not None:  # a skipped iteration has no norm
                key = f"iteration {self.record.iterations}, {name}"
                self.record.numbers[key] = float(value).hex()
        return result

    def finish(self) -> None:
        """Complete the record; call it after the script has returned."""
        self.check_trained()
        # Only now, because with --overlap-param-gather the last step's weights arrive late.
        self.record.after = weight_hashes(self.chunks)
        self.record.after["optimizer state"] = optimizer_hash(self.optimizer)
        self.record.collectives = dict(self._collectives.counts)
        fusing = FEATURE.wrappers
        overlapping = FEATURE.overlapping
        if fusing is not None:
            self.record.calls = [(*key, count) for key, count in fusing.calls.items()]
        if overlapping is not None and overlapping.overlap is not None:
            waited = overlapping.weight_gradients.most
            self.record.overlapped = overlapping.overlap.runs + waited


def main(folder: str, way: str, *command: str) -> None:
    """Run a script with stand-ins and write the record of this rank."""
    observer = Observer(Record(rank=int(os.environ["RANK"])))

    def prepare() -> None:
        install_stand_ins()
        observer.install()
        if way == "commfuse":
            install()
        if importlib.util.find_spec("mindspeed_llm") is None:
            triton_stand_in.install()
            # Users add this import to Megatron's script; a second one changes nothing.
            importlib.import_module("mindspeed.megatron_adaptor")

    try:
        launch.main(command, prepare)
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            raise
    observer.finish()
    observer.record.write(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
