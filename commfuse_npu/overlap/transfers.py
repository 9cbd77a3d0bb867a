"""Hooks torch.distributed, so that a forward and a backward take turns at its collectives.

While a pair runs, a blocking collective of a named group becomes: start it, hand over, wait::

    work = all_gather_into_tensor(output, input, group, async_op=True)
    turns.reach_point(True, work, work)  # the other side computes while this transfer is under way
    work.wait()

An asynchronous collective stays asynchronous.  In strict turns the ``wait()`` of a reduce-scatter,
an all-reduce and an all-to-all hands over first; that of an all-gather does not, because Megatron
hides the all-gather of a backward behind its dgrad.  A chosen order
(:mod:`commfuse_npu.plan.turn_order`) may hand over at any ``wait()``, and after an asynchronous
collective started.  The host's wait for a stream or an event is a hand-over point, too, because
experts read their token counts there.  Outside a pair, and for other groups, nothing changes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from commfuse_npu.overlap.turns import FORWARD, NAMES, Turns
from commfuse_npu.runtime.order_log import Entry, OrderLog
from commfuse_npu.runtime.undefined_results import results_are_undefined

__all__ = ["active_turns", "handing_over", "hook_collectives", "take_turns_at_transfers"]

_WAIT_HANDS_OVER = {
    "all_gather": False,
    "all_gather_into_tensor": False,
    "all_gather_single": False,
    "all_reduce": True,
    "all_to_all": True,
    "all_to_all_single": True,
    "reduce_scatter": True,
    "reduce_scatter_single": True,
    "reduce_scatter_tensor": True,
}
"""Collectives by all names of torch 2.7 to 2.13, and whether the ``wait()`` of an asynchronous one
hands over in strict turns."""

Groups = Mapping[dist.ProcessGroup | None, int]
"""Groups whose collectives hand over, with their numbers in the order log; the key ``None`` is the
default group."""

_turns: Turns | None = None
_groups: Groups = {}
_log: OrderLog | None = None
_beginning = False
"""Whether a wrapped function is running: some functions of torch call others that are wrapped."""


def active_turns() -> Turns | None:
    """The turns of the pair that runs in this process, ``None`` if none does."""
    return _turns


@contextmanager
def take_turns_at_transfers(
    turns: Turns, groups: Groups, log: OrderLog | None = None
) -> Iterator[None]:
    """Make collectives of these groups hand over in the block.

    Raises:
        RuntimeError: another pair is running.
    """
    global _turns, _groups, _log
    if _turns is not None:
        raise RuntimeError(
            "a forward and a backward run side by side already; a pair cannot contain another one"
        )
    hook_collectives()
    _refuse_fsdp()
    _turns, _groups, _log = turns, groups, log
    try:
        yield
    finally:
        # gloo may abort a process that ends with a reference to one of its groups.
        _turns, _groups, _log = None, {}, None


class _Transfer:
    """A ``Work`` whose ``wait()`` is a hand-over point while the pair runs that started it."""

    def __init__(self, work: Any, turns: Turns, hands_over: bool, log: Entry | None) -> None:
        self._work, self._began_in, self._hands_over = work, turns, hands_over
        self._log = log

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if _turns is self._began_in:
            self._began_in.reach_point(self._hands_over, waits_for=self._work)
        if self._log is not None:
            self._log("await")
            self._log = None
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def handing_over(function: Callable[..., Any], wait_hands_over: bool) -> Callable[..., Any]:
    """Wrap a collective, which has the parameters ``group`` and ``async_op``, in that order.

    Args:
        wait_hands_over: whether the ``wait()`` of an asynchronous one hands over in strict turns.
    """
    names = list(inspect.signature(function).parameters)
    group_at, async_at = names.index("group"), names.index("async_op")

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        global _beginning
        turns = _turns
        asynchronous = kwargs.get("async_op", False) or args[async_at:] == (True,)
        if results_are_undefined() and not asynchronous:
            return None
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        if turns is None or _beginning or group not in _groups:
            return function(*args, **kwargs)
        kwargs.pop("async_op", None)
        log = _recorded(function.__name__, group, turns.side, (*args, *kwargs.values()))
        _beginning = True
        try:
            work = function(*args[:async_at], async_op=True, **kwargs)
        finally:
            _beginning = False
        if work is None:  # this rank is not in the group
            return None
        if asynchronous:
            turns.reach_point(False, work)
            return _Transfer(work, turns, wait_hands_over, log)
        turns.reach_point(True, work, work)
        if log is not None:
            log("await")
        work.wait()
        return None

    return collective


def _recorded(
    name: str, group: dist.ProcessGroup | None, side: int, given: tuple[Any, ...]
) -> Entry | None:
    """The entry of the order log for a collective that is about to start."""
    if _log is None:
        return None
    tensor = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
    # An all-to-all may give each rank another number of rows.
    size = 0 if name.startswith("all_to_all") else tensor.nbytes
    return _log.collective(_groups[group], name, f"{name} of a {NAMES[side]}", size, tensor.dtype)


def _host_wait(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the wait for an event or a functional collective (of DTensor, too); it has no group."""

    @functools.wraps(function)
    def wait(first: Any) -> Any:
        if _turns is not None:
            _turns.reach_point(True)
        return function(first)

    return wait


def _stream_synchronize(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stream's synchronize: wait for what was enqueued so far, not for the other side."""

    @functools.wraps(function)
    def synchronize(stream: Any) -> Any:
        return function(stream) if _turns is None else stream.record_event().synchronize()

    return synchronize


def _refused(function: Callable[..., Any], why: str, applies: Callable[..., Any]) -> Any:
    """Wrap a function so that it raises in a pair, if ``applies`` to its first argument."""

    @functools.wraps(function)
    def refuse(first: Any, *args: Any, **kwargs: Any) -> Any:
        if _turns is not None and applies(first):
            raise RuntimeError(why)
        return function(first, *args, **kwargs)

    return refuse


@functools.cache
def hook_collectives() -> None:
    """Wrap the functions, once; outside a pair they do what they did, unless their results are left
    undefined (:mod:`~commfuse_npu.runtime.undefined_results`)."""
    for name, wait_hands_over in _WAIT_HANDS_OVER.items():
        if hasattr(c10d, name):
            _wrap(c10d, name, handing_over, wait_hands_over)
    _wrap(functional, "wait_tensor", _host_wait)
    for name, wrapper in (("Event", _host_wait), ("Stream", _stream_synchronize)):
        # A set, because torch_npu may have replaced CUDA's class by its own.
        owners = {getattr(getattr(torch, device, None), name, None) for device in ("cuda", "npu")}
        for owner in owners - {None}:
            _wrap(owner, "synchronize", wrapper)
    _wrap(
        torch.autograd.graph,
        "_engine_run_backward",
        _refused,
        "a backward inside the forward of a pair: on a device its autograd thread is parked in the "
        "other side's backward, and both would wait for ever; run this forward by itself",
        lambda _: _turns is not None and _turns.side == FORWARD,
    )
    _wrap(
        torch.nn.parallel.DistributedDataParallel,
        "forward",
        _refused,
        "DistributedDataParallel outside of no_sync() in a pair: the second forward before a "
        "backward leaves gradients unreduced; run pairs within model.no_sync(), and the forward "
        "and backward of the last micro-batch by themselves after it",
        lambda model: model.require_backward_grad_sync,
    )


def _refuse_fsdp() -> None:
    """Refuse FSDP if it was imported; importing it here makes gloo abort at the process's end."""
    for module, owner, name in (
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "forward"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "_root_pre_forward"),
    ):
        target = getattr(sys.modules.get(module), owner, None)
        if target is not None and not hasattr(getattr(target, name), "__wrapped__"):
            _wrap(
                target,
                name,
                _refused,
                "a fully sharded module in a pair: the backward would free or re-gather parameters "
                "that the forward beside it uses; run its micro-batches one after the other",
                lambda _: True,
            )


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any], *how: Any) -> None:
    """Replace a function, also in modules that imported it, as Megatron's dist_all_gather_func."""
    old = getattr(owner, name)
    new = wrapper(old, *how)
    setattr(owner, name, new)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for alias in [alias for alias, value in list(names.items()) if value is old]:
            setattr(module, alias, new)
