"""State of Megatron, MindSpeed and MindSpeed-LLM outside the autograd graph: each pass has its own.

A forward sets this state for its micro-batch, and a recomputation sets it for another.  The names
that are always swapped were found in rehearsed launches, by the census.

**The census** watches the first passes of a training, which run in Megatron's order.  At their
points, globals, class attributes, attributes of objects, variables of closures and the contents of
containers are compared with their previous values (:mod:`.state_owners` says of which).

- State that only one kind of pass writes is swapped, too: another one may read it.
- So is a function that passes patch while they run, even if several kinds do: a function cannot be
  a sum over micro-batches.
- A list to which one kind of pass only appends, and from whose front another one only takes, is a
  queue of micro-batches.  Both see them in Megatron's order, so it is shared.
- What else a forward and a backward both write may be a sum over micro-batches, which swapping
  would lose.  Unless it is known to belong to a micro-batch, no forward runs beside a backward.
- Likewise for a recomputation and the gradients beside it.

The census cannot find a value that one pass reads before another has written it;
``--commfuse-overlap-check`` does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from commfuse_npu.overlap import Attributes, PassState, RandomState
from commfuse_npu.overlap.transfers import active_turns
from mindspeed_patches.fb_overlap.state_owners import (
    CONTAINERS,
    Models,
    named_modules,
    state_owners,
)

_EXPERTS = "mindspeed.core.transformer.moe"
_OVERLAPPED = f"{_EXPERTS}.moe_feature.overlap"

GLOBALS = {
    "megatron.core.parallel_state": ("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",),
    "megatron.core.tensor_parallel.random": ("IS_CHECKPOINTING",),
    "megatron.core.utils": ("_nvtx_range_messages",),
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
checkpoint, open ranges of the profiler, lengths and positions of packed documents, and the gathers
of shared experts."""

_OF_A_MICROBATCH = {
    *("attention_mask", "mlp_norm_manager", "gate_score", "_overlap_state"),
    *(f"cached_{part}" for part in ("fc1_input", "fc2_input", "fc2_output", "output")),
}
"""Attributes of modules that a forward writes and reads: the mask of MindSpeed-LLM's attention, an
offloading that core 0.19 begins in any case, and results of overlapped shared experts."""

_HARMLESS = (
    "mindspeed_llm.training.utils._ACTUAL_ATTN_RATIO_LIST",
    "mindspeed_llm.training.utils._ACTUAL_COUNT",
)
"""Names that forwards and backwards write but that do not affect results: statistics of
``--log-throughput`` about the lengths of packed documents."""
_LOOKS = 16
"""The most comparisons per pass and kind; the layers after them repeat the same code."""

_TRACKED = "states_", "_current_state_name"
"""Attributes of Megatron's random-state tracker: the states by name, which ``fork()`` swaps with
the device's, and since core 0.16 the name of the current one."""


def random_states(device: str) -> list[PassState]:
    """The states that a checkpoint of Megatron restores, on ``cpu``, ``npu`` or ``cuda``."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracked = [name for name in _TRACKED if hasattr(tracker, name)]
    return [RandomState(device), Attributes(tracker, *tracked)]


def pass_states(models: Models, device: str) -> list[PassState]:
    """The state that is always swapped in a training of these model chunks."""
    known = [Attributes(owner, *names) for owner, names in _swapped(models)]
    return [*random_states(device), *known]


def _swapped(models: Models) -> Iterator[tuple[Any, list[str]]]:
    """Objects and the names of their swapped attributes; an empty list stands for all attributes.

    Some modules keep state of their last call; one that recomputes a part keeps the checkpoint
    until it is hooked.  Expert dispatchers are swapped completely: they hold shapes, counts and
    permutations of a micro-batch.
    """
    for name, names in GLOBALS.items():
        owner = sys.modules.get(name)
        present = [name for name in names if hasattr(owner, name)]
        if present:
            yield owner, present
    for _, module in named_modules(models):
        for name, value in vars(module).items():
            if name in _OF_A_MICROBATCH or type(value).__name__ == "CheckpointWithoutOutput":
                yield module, [name]
        dispatcher = vars(module).get("token_dispatcher")
        if dispatcher is not None:
            # Parts of DeepEP, and of --moe-alltoall-overlap-comm with alltoall_seq.
            parts = (vars(dispatcher).get(name) for name in ("_comm_manager", "disaptor"))
            yield from ((part, []) for part in (dispatcher, *parts) if part is not None)


@functools.cache
def separate_scratch() -> None:
    """Give each pass its own copy of Megatron's shared gather buffers: rename all but the first
    pass's."""
    buffer: Any = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer
    get: Callable[..., Any] = buffer.get_tensor

    @functools.wraps(get)
    def get_tensor(self: Any, shape: Any, dtype: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        turns = active_turns()
        if turns is not None and turns.running.slot:
            name = f"{name} of pass {turns.running.slot}"
        return get(self, shape, dtype, name, *args, **kwargs)

    buffer.get_tensor = get_tensor


class Census:
    """Compares state at the points of passes.

    Args:
        models: the model chunks.
        functions: code outside of the models that a forward runs, as ``forward_step_func``.
    """

    def __init__(self, models: Models, functions: Iterable[Callable[..., Any]]) -> None:
        self.models = models
        whole = [owner for owner, names in _swapped(models) if not names]
        self._owners = state_owners(models, functions, whole)
        # By name of owner and attribute: kinds of passes that wrote it, by what they did to a list.
        self._writers: defaultdict[tuple[str, str], defaultdict[str, set[str]]]
        self._writers = defaultdict(lambda: defaultdict(set))
        self._before: dict[tuple[str, str], Any] = {}
        # In a pass, by kind: recomputations come after layers that are not recomputed.
        self._looks: Counter[str] = Counter()

    def begin(self) -> None:
        """A pass begins."""
        self._looks.clear()
        self._before = self._values()

    def look(self, kind: str, force: bool = False) -> None:
        """Note what was written since the last look, by this kind of pass.

        Args:
            force: look even if there were many looks in this pass.
        """
        self._looks[kind] += 1
        if self._looks[kind] > _LOOKS and not force:
            return
        before = self._before
        self._before = self._values()
        for name, value in self._before.items():
            if not _same(before.get(name), value):
                self._writers[name][_change(before.get(name), value)].add(kind)

    def _values(self) -> dict[tuple[str, str], Any]:
        return {
            (owner, name): _content(value)
            for owner, holder in self._owners.items()
            for name, value in list(vars(holder).items())
            if not name.startswith("__")  # of Python: warnings that were shown, and the like
        }

    def written_by_both(self, kinds: Collection[str], others: Collection[str]) -> list[str]:
        """Names that both write and that are not known to belong to a micro-batch."""
        return sorted(
            f"{owner}.{name}"
            for owner, name, ends in self._unknown()
            if any(end.intersection(kinds) and end.intersection(others) for end in ends)
        )

    def states(self) -> list[PassState]:
        """What passes wrote, and each pass needs its own of, besides what is always swapped.

        Queues are shared, and tensors that were changed in place: they are sums, as of router
        statistics.
        """
        by_owner: defaultdict[str, list[str]] = defaultdict(list)
        for owner, name, ends in self._unknown():
            holder = self._owners[owner]
            if not _is_sum(holder, vars(holder).get(name)) and len(ends) <= 1:
                by_owner[owner].append(name)
        return [Attributes(self._owners[owner], *names) for owner, names in by_owner.items()]

    def _unknown(self) -> Iterator[tuple[str, str, list[set[str]]]]:
        """Owner, name and :func:`_ends` of what was written, and is not always swapped."""
        known = {
            (id(owner), name)
            for owner, names in _swapped(self.models)
            for name in names or vars(owner)
        }
        for (owner, name), writers in sorted(self._writers.items()):
            ours = (id(self._owners[owner]), name) in known
            if not ours and f"{owner}.{name}" not in _HARMLESS:
                yield owner, name, _ends(writers)


def _ends(writers: Mapping[str, set[str]]) -> list[set[str]]:
    """The kinds of passes at each end of a queue, none of a patch, else all kinds that write it."""
    ends = list(writers.values())
    if set(writers) == {"patch"}:
        return []
    if set(writers) == {"append", "take"} and ends[0].isdisjoint(ends[1]):
        return ends
    return [set().union(*ends)]


def _change(before: Any, value: Any) -> str:
    """``append`` to a list, ``take`` from its front, ``patch`` a function, or ``write``."""
    if inspect.isroutine(before) and inspect.isroutine(value):
        return "patch"
    lists = isinstance(before, tuple) and isinstance(value, tuple) and before[0] is value[0]
    if not lists or (value[0] is not list and value[0] is not deque):
        return "write"
    more = len(value) - len(before)
    if more > 0 and _same(before, value[: len(before)]):
        return "append"
    if more < 0 and _same(before[1 - more :], value[1:]):
        return "take"
    return "write"


def _is_sum(holder: Any, value: Any) -> bool:
    """Whether a value that changed is not swapped: tensors, and dictionaries of tensors."""
    if isinstance(value, dict):
        return any(_is_sum(holder, item) for item in value.values())
    return isinstance(value, torch.Tensor) and isinstance(holder, torch.nn.Module)


def _content(value: Any) -> Any:
    """What is compared: the items of containers, and of a tensor its object and version."""
    if isinstance(value, dict):
        items = list(value.items())  # at once, as a thread may fill it
        return dict, *(key for key, _ in items), *(_version(item) for _, item in items)
    if isinstance(value, CONTAINERS):
        return type(value), *map(_version, value)
    return _version(value)


def _version(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return value, value._version
    return value


def _same(before: Any, value: Any) -> bool:
    if before is value:
        return True
    if isinstance(value, tuple) and isinstance(before, tuple):
        return len(before) == len(value) and all(map(_same, before, value))
    return isinstance(value, (int, float, str)) and bool(before == value)
