"""Hooks torch.distributed, so that passes take turns at its collectives.

While passes run, a blocking collective of a named group becomes: start it, hand over, wait::

    work = all_gather_into_tensor(output, input, group, async_op=True)
    turns.hand_over()  # other passes compute while this transfer is in flight
    work.wait()

An asynchronous collective stays asynchronous.  The ``wait()`` of a reduce-scatter, an all-reduce
and an all-to-all hands over first; that of an all-gather does not, because Megatron hides the
all-gather of a backward behind its dgrad.  The wait for a functional collective hands over, and the
host's wait for a stream or an event where the code of named modules waits: experts read their token
counts there, on all ranks.  Other threads, other groups and the rest of a program are unchanged.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from commfuse_npu.overlap.turns import Turns
from commfuse_npu.runtime.order_log import Entry, OrderLog
from commfuse_npu.runtime.undefined_results import results_are_undefined

__all__ = [
    "COLLECTIVES",
    "active_turns",
    "handing_over",
    "hook_collectives",
    "take_turns_at_transfers",
]

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
"""Collectives that hand over, by all names of torch 2.7 to 2.13."""

Function = Callable[..., Any]

Groups = Mapping[dist.ProcessGroup | None, int]
"""Groups whose collectives hand over, with their numbers in the order log; the key ``None`` is the
default group."""

_turns: Turns | None = None
_groups: Groups = {}
_waits_in: tuple[str, ...] = ()
_log: OrderLog | None = None


def active_turns() -> Turns | None:
    """The turns of the pass that runs in the calling thread, ``None`` in any other thread."""
    return _turns if _turns is not None and _turns.runs_here() else None


@contextmanager
def take_turns_at_transfers(
    turns: Turns, groups: Groups, waits_in: tuple[str, ...] = (), log: OrderLog | None = None
) -> Iterator[None]:
    """Make collectives of these groups hand over in the block.

    Args:
        waits_in: beginnings of the names of modules whose waits for streams and events hand over.

    Raises:
        RuntimeError: other passes are running.
    """
    global _turns, _groups, _waits_in, _log
    if _turns is not None and not _turns.over:
        raise RuntimeError(
            "passes take turns already, in this thread or in another one; a pass cannot run others"
        )
    hook_collectives()
    _refuse_fsdp()
    _turns = turns
    _groups = groups
    _waits_in = waits_in
    _log = log
    try:
        yield
    finally:
        # gloo may abort a process that ends with a reference to one of its groups.
        _turns = None
        _groups = {}
        _log = None


@dataclass(eq=False)
class _Transfer:
    """A ``Work`` whose ``wait()`` is a point of the pass that waits."""

    _work: Any
    _point: str
    _hands_over: bool
    _log: Entry | None

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        turns = active_turns()
        if turns is not None:
            turns.reach_point(f"wait of {self._point}", self._hands_over, fills=True)
        if self._log is not None:
            self._log("await")
            self._log = None
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def handing_over(function: Function) -> Function:
    """Wrap a collective, which has the parameters ``group`` and ``async_op``, in that order.

    The ``wait()`` of an asynchronous one hands over, unless its name begins with ``all_gather``.
    """
    names = list(inspect.signature(function).parameters)
    group_at = names.index("group")
    async_at = names.index("async_op")
    wait_hands_over = not function.__name__.startswith("all_gather")

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        asynchronous = kwargs.get("async_op", False) or args[async_at:] == (True,)
        if results_are_undefined() and not asynchronous:
            return None
        turns = active_turns()
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        if turns is None or group not in _groups or _is_coalesced(group):
            return function(*args, **kwargs)
        kwargs.pop("async_op", None)
        log = _recorded(function.__name__, group, turns, (*args, *kwargs.values()))
        point = f"{function.__name__} of group {list(_groups).index(group)}"
        with turns.paused():  # some functions of torch call others that are wrapped
            work = function(*args[:async_at], async_op=True, **kwargs)
        if work is None:  # this rank is not in the group
            return None
        if asynchronous:
            turns.reach_point(point, hands_over=False)
            return _Transfer(work, point, wait_hands_over, log)
        turns.reach_point(point, hands_over=True, fills=True)
        if log is not None:
            log("await")
        work.wait()
        return None

    return collective


def _is_coalesced(group: dist.ProcessGroup | None) -> bool:
    """Whether collectives of the group are collected, to start together later."""
    world: Any = c10d._world
    return bool(world.pg_coalesce_state) and (group or dist.group.WORLD) in world.pg_coalesce_state


def _recorded(
    name: str, group: dist.ProcessGroup | None, turns: Turns, given: tuple[Any, ...]
) -> Entry | None:
    """The entry of the order log for a collective that is about to start."""
    if _log is None:
        return None
    tensor = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
    # An all-to-all may give each rank another number of rows.
    size = 0 if name.startswith("all_to_all") else tensor.nbytes
    of = f"{name} of a {turns.running.name}"
    return _log.collective(_groups[group], name, of, size, tensor.dtype)


def _preceded(function: Function, act: Callable[..., object]) -> Function:
    """Wrap a function of one object: in a pass, ``act(turns, object)`` comes before it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        turns = active_turns()
        if turns is not None:
            act(turns, *args[:1])
        return function(*args, **kwargs)

    return call


def _wait_functional(turns: Turns, *_: Any) -> None:
    """Before the wait for a functional collective (of DTensor, too); it does not know its group."""
    turns.reach_point("wait of a functional collective", hands_over=True, fills=True)


def _wait_for_event(turns: Turns, _: Any) -> None:
    """Before the host's wait for an event."""
    _reach_host_wait(turns, sys._getframe(2))


_event_synchronize = functools.partial(_preceded, act=_wait_for_event)


def _reach_host_wait(turns: Turns, caller: FrameType) -> None:
    if _waits_in and caller.f_globals.get("__name__", "").startswith(_waits_in):
        turns.reach_point("wait of the host", hands_over=True)


def _stream_synchronize(function: Function) -> Function:
    """Wrap a stream's synchronize: wait for what was enqueued so far, not for other passes."""

    @functools.wraps(function)
    def synchronize(stream: Any) -> Any:
        turns = active_turns()
        if turns is None:
            return function(stream)
        event = stream.record_event()
        _reach_host_wait(turns, sys._getframe(1))
        with turns.paused():
            return event.synchronize()

    return synchronize


def _refuse_ddp(_: Turns, model: Any) -> None:
    if model.require_backward_grad_sync and torch.is_grad_enabled():
        raise RuntimeError(
            "DistributedDataParallel outside of no_sync() in a pass: a second forward before the "
            "backward leaves gradients unreduced; run passes within model.no_sync(), and the "
            "forward and backward of the last micro-batch by themselves after it"
        )


def _refuse_fully_sharded(*_: Any) -> None:
    raise RuntimeError(
        "a fully sharded module in a pass: a backward would free or re-gather parameters that the "
        "forward beside it uses; run its micro-batches one after the other"
    )


@functools.cache
def hook_collectives() -> None:
    """Wrap the functions, once; outside of passes they do what they did, unless their results are
    left undefined (:mod:`~commfuse_npu.runtime.undefined_results`)."""
    wraps: list[tuple[Any, str, Function]] = [
        (c10d, name, handing_over) for name in COLLECTIVES if hasattr(c10d, name)
    ]
    wraps.append((functional, "wait_tensor", functools.partial(_preceded, act=_wait_functional)))
    for name, wrapper in (("Event", _event_synchronize), ("Stream", _stream_synchronize)):
        # A set, because torch_npu may have replaced CUDA's class by its own.
        owners = {getattr(getattr(torch, device, None), name, None) for device in ("cuda", "npu")}
        wraps += [(owner, "synchronize", wrapper) for owner in owners - {None}]
    ddp = torch.nn.parallel.DistributedDataParallel
    wraps.append((ddp, "forward", functools.partial(_preceded, act=_refuse_ddp)))
    _wrap(wraps)


def _refuse_fsdp() -> None:
    """Refuse FSDP if it was imported; importing it here makes gloo abort at the process's end."""
    for module, owner, name in (
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "forward"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "_root_pre_forward"),
    ):
        target = getattr(sys.modules.get(module), owner, None)
        if target is not None and not hasattr(getattr(target, name), "__wrapped__"):
            _wrap([(target, name, functools.partial(_preceded, act=_refuse_fully_sharded))])


def _wrap(wraps: Iterable[tuple[Any, str, Function]]) -> None:
    """Replace functions, also in modules that imported them, as Megatron's dist_all_gather_func.

    Args:
        wraps: owner and name of a function, and what wraps it.
    """
    # By the number of the old function, which stays alive here.
    replaced: dict[int, tuple[Any, Any]] = {}
    for owner, name, wrapper in wraps:
        old = getattr(owner, name)
        new = wrapper(old)
        setattr(owner, name, new)
        replaced[id(old)] = old, new
    # One pass over all names of all modules: there are tens of thousands.
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for alias in [alias for alias, value in list(names.items()) if id(value) in replaced]:
            setattr(module, alias, replaced[id(names[alias])][1])
