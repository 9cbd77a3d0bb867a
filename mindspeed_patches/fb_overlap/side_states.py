"""State of Megatron, MindSpeed and MindSpeed-LLM outside the autograd graph, swapped per side.

A forward sets this state for its micro-batch, and a backward with recomputation sets it for
another.  The census (:mod:`.census`) found the names in rehearsed launches.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commfuse_npu.overlap import Attributes, RandomState, SideState
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.overlap.turns import BACKWARD

__all__ = ["named_modules", "separate_scratch", "side_states", "swapped"]

_EXPERTS = "mindspeed.core.transformer.moe"
_OVERLAPPED = f"{_EXPERTS}.moe_feature.overlap"

GLOBALS = {
    "megatron.core.parallel_state": ("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",),
    "megatron.core.tensor_parallel.random": ("IS_CHECKPOINTING",),
    "mindspeed.utils": ("_ACTUAL_SEQ_LEN", "_POSITION_IDS", "_KV_INDEX", "_Q_INDEX"),
    "mindspeed.core.context_parallel.get_batch_utils": ("_ACTUAL_SEQ_LEN", "_POSITION_IDS"),
    "mindspeed_llm.training.utils": (
        *("_ACTUAL_SEQ_LEN_LIST", "_MTP_POSITION_ID", "_MTP_BATCH_LIST"),
    ),
    # All modules of a folder share one list.
    **dict.fromkeys(
        (
            *(f"{_EXPERTS}.moe_utils", f"{_EXPERTS}.moe_layer_overlap_all2all"),
            *(f"{_OVERLAPPED}.moe_common", f"{_OVERLAPPED}.moe_layer_overlap_all2allseq"),
            f"{_OVERLAPPED}.moe_layer_overlap_allgather",
        ),
        ("AG_SHARED_EXPERTS_INPUTS",),
    ),
}
"""Module globals to swap, where a version has them: the virtual stage, the flag of a running
checkpoint, lengths and positions of packed documents, and the gathers of shared experts."""

_TRACKED = "states_", "_current_state_name"
"""Attributes of Megatron's random-state tracker: the states by name, which ``fork()`` swaps with
the device's, and since core 0.16 the name of the current one."""


def side_states(models: Sequence[torch.nn.Module], device: str) -> list[SideState]:
    """The state to swap in a training of these model chunks, on ``cpu``, ``npu`` or ``cuda``."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracked = [name for name in _TRACKED if hasattr(tracker, name)]
    states: list[SideState] = [RandomState(device), Attributes(tracker, *tracked)]
    return [*states, *(Attributes(owner, *names) for owner, names in swapped(models))]


def swapped(models: Sequence[torch.nn.Module]) -> Iterator[tuple[Any, list[str]]]:
    """Objects and the names of their swapped attributes; an empty list stands for all attributes.

    Some modules keep state of their last call: attention of MindSpeed-LLM keeps its mask, and a
    module that recomputes a part keeps the checkpoint until it is hooked.  Expert dispatchers are
    swapped completely: they hold shapes, counts and permutations of a micro-batch.
    """
    for name, names in GLOBALS.items():
        owner = sys.modules.get(name)
        present = [name for name in names if hasattr(owner, name)]
        if present:
            yield owner, present
    for _, module in named_modules(models):
        for name, value in vars(module).items():
            if name == "attention_mask" or type(value).__name__ == "CheckpointWithoutOutput":
                yield module, [name]
        dispatcher = vars(module).get("token_dispatcher")
        if dispatcher is not None:
            # Parts of DeepEP, and of --moe-alltoall-overlap-comm with alltoall_seq.
            parts = (vars(dispatcher).get(name) for name in ("_comm_manager", "disaptor"))
            yield from ((part, []) for part in (dispatcher, *parts) if part is not None)


def named_modules(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules, with paths that are unique across model chunks."""
    for chunk, model in enumerate(models):
        for path, module in model.named_modules():
            yield f"chunk {chunk}, {path}: {type(module).__name__}", module


@functools.cache
def separate_scratch() -> None:
    """Give each side its own copy of Megatron's shared gather buffers: rename the backward's."""
    buffer: Any = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer
    get: Callable[..., Any] = buffer.get_tensor

    @functools.wraps(get)
    def get_tensor(self: Any, shape: Any, dtype: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        turns = active_turns()
        if turns is not None and turns.side == BACKWARD:
            name = f"{name} of the backward"
        return get(self, shape, dtype, name, *args, **kwargs)

    buffer.get_tensor = get_tensor
