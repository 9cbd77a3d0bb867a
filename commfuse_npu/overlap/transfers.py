"""The collectives of torch.distributed, as places where a forward and a backward take turns.

While a pair runs, a blocking collective of a named group becomes: begin it, hand over, wait::

    work = all_gather_into_tensor(output, input, group, async_op=True)
    turns.place(True, work, work)  # the other side computes while this transfer is under way
    work.wait()

An asynchronous collective stays as it is.  In strict turns the ``wait()`` of a reduce-scatter, an
all-reduce and an all-to-all hands over first; that of an all-gather does not, because Megatron
hides the all-gather of a backward behind its dgrad.  A chosen order
(:mod:`commfuse_npu.plan.turn_order`) may hand over at any ``wait()``, and after an asynchronous
collective began.  The host's wait for a stream or an event, where experts read how many tokens each
of them gets, is a place, too.  Outside of a pair, and for other groups, nothing changes.
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
from commfuse_npu.runtime.order_log import CollectiveLog, TransportLog

__all__ = ["active_turns", "take_turns_at_transfers"]

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
"""Collectives that are places to hand over, by all names of torch 2.7 to 2.13, and whether the
``wait()`` of an asynchronous one is such a place too."""

Groups = Mapping[dist.ProcessGroup | None, TransportLog | None]
"""Groups whose collectives are places to hand over, with where these are recorded; ``None`` stands
for the whole job's, and for nowhere."""

_turns: Turns | None = None
_groups: Groups = {}
_beginning = False
"""Inside of a function that is wrapped: some names of torch call others."""


def active_turns() -> Turns | None:
    """The turns of the pair that runs in this process, ``None`` if none does."""
    return _turns


@contextmanager
def take_turns_at_transfers(turns: Turns, groups: Groups) -> Iterator[None]:
    """Make collectives of these groups places to hand over.

    Raises:
        RuntimeError: a pair runs already.
    """
    global _turns, _groups
    if _turns is not None:
        raise RuntimeError(
            "a forward and a backward run side by side already; a pair cannot contain another one"
        )
    _install()
    _refuse_fsdp()
    _turns, _groups = turns, groups
    try:
        yield
    finally:
        # gloo may abort a process that ends with a reference to one of its groups.
        _turns, _groups = None, {}


class _Transfer:
    """A ``Work`` whose ``wait()`` is a place to hand over while the pair runs in which it began."""

    def __init__(
        self, work: Any, turns: Turns, hands_over: bool, log: CollectiveLog | None
    ) -> None:
        self._work, self._began_in, self._hands_over = work, turns, hands_over
        self._log = log

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if _turns is self._began_in:
            self._began_in.place(self._hands_over, waits_for=self._work)
        if self._log is not None:
            self._log.wait()
            self._log = None
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _collective(function: Callable[..., Any], wait_hands_over: bool) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)
    group_at, async_at = names.index("group"), names.index("async_op")

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        global _beginning
        turns = _turns
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        if turns is None or _beginning or group not in _groups:
            return function(*args, **kwargs)
        asynchronous = kwargs.pop("async_op", False) or args[async_at:] == (True,)
        log = _recorded(function.__name__, group, turns.side, (*args, *kwargs.values()))
        _beginning = True
        try:
            work = function(*args[:async_at], async_op=True, **kwargs)
        finally:
            _beginning = False
        if work is None:  # this rank is not in the group
            return None
        if asynchronous:
            turns.place(False, work)
            return _Transfer(work, turns, wait_hands_over, log)
        turns.place(True, work, work)
        if log is not None:
            log.wait()
        work.wait()
        return None

    return collective


def _recorded(
    name: str, group: dist.ProcessGroup | None, side: int, given: tuple[Any, ...]
) -> CollectiveLog | None:
    """A line of the order log for the collective that is about to begin."""
    log = _groups[group]
    if log is None:
        return None
    tensor = next(one for one in tree_leaves(given) if isinstance(one, torch.Tensor))
    # An all-to-all may give each rank another number of rows.
    size = 0 if name.startswith("all_to_all") else tensor.nbytes
    return log.collective(name, f"{name} of a {NAMES[side]}", size, tensor.dtype)


def _host_wait(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of an event, or of a functional collective, DTensor's included: its wait names no group."""

    @functools.wraps(function)
    def wait(first: Any) -> Any:
        if _turns is not None:
            _turns.place(True)
        return function(first)

    return wait


def _stream_synchronize(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a stream: the host waits for what was enqueued so far, not for the other side's work."""

    @functools.wraps(function)
    def synchronize(stream: Any) -> Any:
        return function(stream) if _turns is None else stream.record_event().synchronize()

    return synchronize


def _refused(function: Callable[..., Any], why: str, applies: Callable[..., Any]) -> Any:
    """Raises in a pair, if it applies to the first argument."""

    @functools.wraps(function)
    def refuse(first: Any, *args: Any, **kwargs: Any) -> Any:
        if _turns is not None and applies(first):
            raise RuntimeError(why)
        return function(first, *args, **kwargs)

    return refuse


@functools.cache
def _install() -> None:
    """Wrap the functions, once; without a pair they do what they did."""
    for name, wait_hands_over in _WAIT_HANDS_OVER.items():
        if hasattr(c10d, name):
            _wrap(c10d, name, _collective, wait_hands_over)
    _wrap(functional, "wait_tensor", _host_wait)
    for name, wrapper in (("Event", _host_wait), ("Stream", _stream_synchronize)):
        # One class, where torch_npu has put its own in the place of CUDA's.
        found = {getattr(getattr(torch, device, None), name, None) for device in ("cuda", "npu")}
        for owner in found - {None}:
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
    """Where it was imported by now; an import of its own makes gloo abort at the process's end."""
    for module, owner, name in (
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "forward"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "_root_pre_forward"),
    ):
        found = getattr(sys.modules.get(module), owner, None)
        if found is not None and not hasattr(getattr(found, name), "__wrapped__"):
            _wrap(
                found,
                name,
                _refused,
                "a fully sharded module in a pair: the backward would free or re-gather parameters "
                "that the forward beside it uses; run its micro-batches one after the other",
                lambda _: True,
            )


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any], *how: Any) -> None:
    """Also in every module that holds it: Megatron has its dist_all_gather_func."""
    old = getattr(owner, name)
    new = wrapper(old, *how)
    setattr(owner, name, new)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for held in [held for held, value in list(names.items()) if value is old]:
            setattr(module, held, new)
