"""Run a pretraining script for ``commfuse-npu measure --launch``, and print a hash of its weights.

::

    torchrun ... -m mindspeed_patches.measured [--blocking] pretrain_gpt.py ...

is ``torchrun ... -m mindspeed_patches.launch pretrain_gpt.py ...``.  When the script has finished,
rank 0 prints the memory in use on the fullest device, including HCCL's buffers, and one SHA-256 of
the weights of all ranks and of their optimizer states (fp32 weights, moments).  No source is
edited: MindSpeed's patch manager wraps ``setup_model_and_optimizer`` to get the model and the
optimizer that it returns.

``--blocking`` is the form without overlap: each asynchronous collective of the tensor-parallel
group, such as those of Megatron's backward, is waited for at once (on an NPU: by the compute
stream).  The arithmetic is the same.

Rehearsed on CPU with MindSpeed-LLM and stand-ins, never run on an NPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.runtime.child_process import die_with_parent
from mindspeed_patches import launch
from mindspeed_patches.patching import Function, around
from mindspeed_patches.registration import install, wrap_training
from mindspeed_patches.state_hashes import TrainedState, hash_over_ranks

_POSTED = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"),
    *("_all_gather_base", "_reduce_scatter_base"),
)
"""Collectives that Megatron's layers (core_v0.12.1, ``tensor_parallel/layers.py``) post
asynchronously."""


def main(command: Sequence[str] | None = None) -> None:
    """Run ``command``, a script and its arguments, by default those of this process."""
    die_with_parent()
    words = list(sys.argv[1:] if command is None else command)
    run = MeasuredRun(blocking=words[:1] == ["--blocking"])
    launch.main(words[1:] if run.blocking else words, run.prepare)
    run.tell()


class MeasuredRun(TrainedState):
    """A training run that is measured."""

    def __init__(self, blocking: bool) -> None:
        super().__init__()
        self.blocking = blocking
        self.waited: list[str] = []

    def prepare(self) -> None:
        """Apply the patches; call it before Megatron is imported, which copies the functions."""
        install()
        for name in _POSTED if self.blocking else ():
            setattr(dist, name, self.posted_wrapper(getattr(dist, name)))
        wrap_training(self.setup_model_and_optimizer_wrapper)

    @around
    def posted_wrapper(self, collective: Function, *args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        group = kwargs.get("group")
        if kwargs.get("async_op") and group is not None:
            state: Any = sys.modules["megatron.core.parallel_state"]
            if group is state.get_tensor_model_parallel_group(check_initialized=False):
                work.wait()
                self.waited.append(collective.__name__)
        return work

    def tell(self) -> None:
        """Print the fullest device's memory and the hash of the final state; collective."""
        self.check_trained()
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        megabytes = (total - free) / 2**20  # the NPU's memory, under MindSpeed
        bits = hash_over_ranks(self.chunks, self.optimizer)
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, megabytes)
        if dist.get_rank() == 0:
            if self.blocking:
                print(f"collectives waited for at once: {len(self.waited)}", flush=True)
            print(f"most memory taken of a device (MB): {max(by_rank)}", flush=True)
            print(f"sha256 of all weights: {bits}", flush=True)


if __name__ == "__main__":
    main()
