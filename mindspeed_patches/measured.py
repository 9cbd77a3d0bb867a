"""Run a pretraining script for ``commfuse-npu measure --launch``, and say which bits it ended with.

::

    torchrun ... -m mindspeed_patches.measured [--blocking] pretrain_gpt.py ...

is ``torchrun ... pretrain_gpt.py ...``, with CommFuse registered if ``--use-commfuse`` is among the
arguments.  When the script is over rank 0 prints how much memory of a device is taken at most, with
HCCL's buffers, and one SHA-256 of all ranks' weights and of the state of their optimizers (fp32
weights, moments).  No source is edited: MindSpeed's patch manager puts a wrapper around
``setup_model_and_optimizer``, which notes what it returns.

``--blocking`` is the form without overlap: every collective of the tensor-parallel group that is
posted asynchronously, as Megatron's backward posts them, is waited for at once (on an NPU: by the
stream that computes).  The arithmetic is the same.

Rehearsed on CPU with MindSpeed-LLM and stand-ins, never run on an NPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.runtime.child_process import die_with_parent
from mindspeed_patches import launch
from mindspeed_patches.registration import install
from mindspeed_patches.state_hashes import hash_over_ranks

__all__ = ["main"]

_SETUP = "megatron.training.training.setup_model_and_optimizer"
_POSTED = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"),
    *("_all_gather_base", "_reduce_scatter_base"),
)
"""What Megatron's layers (core_v0.12.1, ``tensor_parallel/layers.py``) post asynchronously."""


def main(command: Sequence[str] | None = None) -> None:
    """Run ``command``, a script and its arguments, by default those of this process."""
    die_with_parent()
    words = list(sys.argv[1:] if command is None else command)
    blocking = words[:1] == ["--blocking"]
    state: list[Any] = []
    waited: list[str] = []

    def prepare() -> None:
        if "--use-commfuse" in words:
            install()
        if blocking:
            _wait_at_once(waited)
        _note_state(state)

    launch.main(words[1:] if blocking else words, prepare)
    _tell(state, waited if blocking else None)


def _note_state(state: list[Any]) -> None:
    """Have model and optimizer noted, whatever MindSpeed's features do to their set-up."""
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
    from mindspeed.patch_utils import MindSpeedPatchesManager

    apply = MindSpeedFeaturesManager.apply_features_patches

    def wrapper(setup: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(setup)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            state[:] = result[:2]
            return result

        return setup_model_and_optimizer

    @functools.wraps(apply)
    def apply_features_patches(args: Any) -> None:
        apply(args)
        MindSpeedPatchesManager.register_patch(_SETUP, wrapper)
        MindSpeedPatchesManager.apply_patches()

    MindSpeedFeaturesManager.apply_features_patches = staticmethod(apply_features_patches)


def _wait_at_once(waited: list[str]) -> None:
    """Install before Megatron is imported, whose layers take the functions as they are then."""
    for name in _POSTED:
        setattr(dist, name, _waiting(getattr(dist, name), waited))


def _waiting(collective: Callable[..., Any], waited: list[str]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def posted(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        group = kwargs.get("group")
        if kwargs.get("async_op") and group is not None and group is _tensor_parallel_group():
            work.wait()
            waited.append(collective.__name__)
        return work

    return posted


def _tensor_parallel_group() -> Any:
    state = sys.modules["megatron.core.parallel_state"]
    return state.get_tensor_model_parallel_group(check_initialized=False)


def _tell(state: list[Any], waited: list[str] | None) -> None:
    """Print what the training ended with, on rank 0.

    Raises:
        RuntimeError: the script did not train.
    """
    if not state:
        raise RuntimeError(
            f"the script never called {_SETUP}; is it a pretraining script of MindSpeed-LLM?"
        )
    model, optimizer = state
    free, whole = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    taken = (whole - free) / 2**20  # the NPU's, where MindSpeed runs
    together = hash_over_ranks(model, optimizer)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, taken)
    if dist.get_rank() == 0:
        if waited is not None:
            print(f"collectives waited for at once: {len(waited)}", flush=True)
        print(f"most memory taken of a device (MB): {max(everyone)}", flush=True)
        print(f"sha256 of all weights: {together}", flush=True)


if __name__ == "__main__":
    main()
