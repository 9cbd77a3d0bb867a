"""The collectives of torch.distributed, as places where a forward and a backward take turns.

While a pair runs, a blocking collective of a named group becomes: begin it, hand over, wait::

    work = all_gather_into_tensor(output, input, group, async_op=True)
    turns.began(work, blocking=True)  # the other side computes while this transfer is under way
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
            self._began_in.waits(self._hands_over, self._work)
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
        turns.began(work, blocking=not asynchronous)
        if asynchronous:
            return _Transfer(work, turns, wait_hands_over, log)
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


def _functional_wait(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of DTensor and all functional collectives, whose waits do not say of which group they are."""

    @functools.wraps(function)
    def wait_tensor(tensor: torch.Tensor) -> Any:
        if _turns is not None:
            _turns.waits(by_default=True)
        return function(tensor)

    return wait_tensor


def _event_synchronize(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of an event: the host waits for what is on its way to it."""

    @functools.wraps(function)
    def synchronize(event: Any) -> Any:
        if _turns is not None:
            _turns.waits(by_default=True)
        return function(event)

    return synchronize


def _stream_synchronize(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a stream: the host waits for what was enqueued so far, not for the other side's work."""

    @functools.wraps(function)
    def synchronize(stream: Any) -> Any:
        return function(stream) if _turns is None else stream.record_event().synchronize()

    return synchronize


def _refused(
    function: Callable[..., Any], why: str, applies: Callable[..., bool] = lambda *_: True
) -> Callable[..., Any]:
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
        function = getattr(c10d, name, None)
        if function is not None:
            _replace(function, _collective(function, wait_hands_over))
    _replace(functional.wait_tensor, _functional_wait(functional.wait_tensor))
    for device in ("cuda", "npu"):
        for name, wrap in (("Event", _event_synchronize), ("Stream", _stream_synchronize)):
            owner = getattr(getattr(torch, device, None), name, None)
            # Not twice, where torch_npu has put its own in the place of CUDA's.
            if owner is not None and not hasattr(owner.synchronize, "__wrapped__"):
                owner.synchronize = wrap(owner.synchronize)
    run_backward = torch.autograd.graph._engine_run_backward
    nested = _refused(
        run_backward,
        "a backward inside the forward of a pair: on a device its autograd thread is parked in the "
        "other side's backward, and both would wait for ever; run this forward by itself",
        lambda _: _turns is not None and _turns.side == FORWARD,
    )
    _replace(run_backward, nested)
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    parallel.forward = _refused(
        parallel.forward,
        "DistributedDataParallel outside of no_sync() in a pair: the second forward before a "
        "backward leaves gradients unreduced; run pairs within model.no_sync(), and the forward "
        "and backward of the last micro-batch by themselves after it",
        lambda model: bool(model.require_backward_grad_sync),
    )


def _refuse_fsdp() -> None:
    """Where FSDP was imported by now."""
    for module, owner, method in (
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "forward"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "_root_pre_forward"),
    ):
        found = getattr(sys.modules.get(module), owner, None)
        if found is not None and not hasattr(getattr(found, method), "__wrapped__"):
            why = (
                "a fully sharded module in a pair: the backward would free or re-gather parameters "
                "that the forward beside it uses; run its micro-batches one after the other"
            )
            setattr(found, method, _refused(getattr(found, method), why))


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """In every module that holds it: others took references, Megatron its dist_all_gather_func."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(module, name, new)
