"""State of Megatron, MindSpeed and MindSpeed-LLM outside the autograd graph, swapped per side.

A forward sets this state for its micro-batch, and a backward with recomputation sets it for
another.  The names were found in rehearsed launches, by the census.

**The census** runs the first step in Megatron's order.  At each transfer at which a pair could hand
over, module globals and attributes are compared with their previous values.  If a forward and a
backward both wrote a name that is neither swapped nor harmless, the overlap is refused: one side
would read what the other one wrote.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from commfuse_npu.overlap import Attributes, ForwardBackwardOverlap, RandomState, SideState
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.overlap.turns import BACKWARD

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

_PACKAGES = ("megatron.", "mindspeed.", "mindspeed_llm.", "transformer_engine.")
_HARMLESS = (
    "mindspeed_llm.training.utils._ACTUAL_ATTN_RATIO_LIST",
    "mindspeed_llm.training.utils._ACTUAL_COUNT",
)
"""Names that both sides write but that do not affect results: statistics of ``--log-throughput``
about the lengths of packed documents."""
_SNAPSHOTS = 100
"""The most comparisons per side of a micro-batch; the layers after them repeat the same code."""

_TRACKED = "states_", "_current_state_name"
"""Attributes of Megatron's random-state tracker: the states by name, which ``fork()`` swaps with
the device's, and since core 0.16 the name of the current one."""


def side_states(models: Sequence[torch.nn.Module], device: str) -> list[SideState]:
    """The state to swap in a training of these model chunks, on ``cpu``, ``npu`` or ``cuda``."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracked = [name for name in _TRACKED if hasattr(tracker, name)]
    states: list[SideState] = [RandomState(device), Attributes(tracker, *tracked)]
    return [*states, *(Attributes(owner, *names) for owner, names in _swapped(models))]


def _swapped(models: Sequence[torch.nn.Module]) -> Iterator[tuple[Any, list[str]]]:
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
    for _, module in _named_modules(models):
        for name, value in vars(module).items():
            if name == "attention_mask" or type(value).__name__ == "CheckpointWithoutOutput":
                yield module, [name]
        dispatcher = vars(module).get("token_dispatcher")
        if dispatcher is not None:
            # Parts of DeepEP, and of --moe-alltoall-overlap-comm with alltoall_seq.
            parts = (vars(dispatcher).get(name) for name in ("_comm_manager", "disaptor"))
            yield from ((part, []) for part in (dispatcher, *parts) if part is not None)


def _named_modules(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
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


class Census:
    """Replaces :class:`~commfuse_npu.overlap.ForwardBackwardOverlap` in the first step."""

    def __init__(self, overlap: ForwardBackwardOverlap, models: Sequence[torch.nn.Module]) -> None:
        self._overlap, self._models = overlap, models
        self._owners = dict(_owners(models))
        self._wrote: tuple[set[tuple[str, str]], set[tuple[str, str]]] = set(), set()
        self._before: dict[tuple[str, str], Any] = {}

    def run(
        self, forward: Callable[[], Any], backward: Callable[[], Any], kind: Hashable
    ) -> tuple[Any, Any]:
        """Run forward, then backward, as Megatron does; record the times that choose the order."""
        return self._overlap.record(forward, backward, kind, self._look)

    def _look(self, side: int, passed: int | None) -> None:
        """Record the names that a side (0 or 1) has written since the last call."""
        if passed is not None and passed > _SNAPSHOTS:
            return
        before, self._before = (
            self._before,
            {
                (owner, name): tuple(value) if isinstance(value, list) else value
                for owner, attributes in self._owners.items()
                for name, value in list(attributes.items())
            },
        )
        if passed != 0:
            self._wrote[side].update(
                name for name, value in self._before.items() if not _same(before.get(name), value)
            )

    @property
    def unknown(self) -> list[str]:
        """Names that both sides wrote and that are not swapped."""
        swaps = {
            (id(vars(owner)), name)
            for owner, names in _swapped(self._models)
            for name in names or vars(owner)
        }
        written = {
            f"{owner}.{name}"
            for owner, name in self._wrote[0] & self._wrote[1]
            if (id(self._owners[owner]), name) not in swaps
        }
        return sorted(written - set(_HARMLESS))


def _same(before: Any, value: Any) -> bool:
    if before is value:
        return True
    if isinstance(value, tuple) and isinstance(before, tuple):
        return len(before) == len(value) and all(map(_same, before, value))
    return isinstance(value, (int, float, str)) and bool(before == value)


def _owners(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of objects that hold state, and their attributes.

    These are the Python modules of the packages, the modules of the models, the objects that these
    hold, and the objects inside those that are swapped completely, such as expert dispatchers.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(_PACKAGES) and module is not None:
            yield name, vars(module)
    whole = {id(owner) for owner, names in _swapped(models) if not names}
    visited: set[int] = set()

    def held_by(owner: str, attributes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield owner, attributes
        for name, value in list(attributes.items()):
            ours = type(value).__module__.startswith(_PACKAGES) and hasattr(value, "__dict__")
            if ours and not isinstance(value, torch.nn.Module) and id(value) not in visited:
                visited.add(id(value))
                if id(value) in whole:
                    yield from held_by(f"{owner}.{name}", vars(value))
                else:
                    yield f"{owner}.{name}", vars(value)

    for path, layer in _named_modules(models):
        yield from held_by(path, vars(layer))
