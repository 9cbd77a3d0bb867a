"""Transfers whose results are there at the ``wait()``, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from commfuse_npu.runtime import collectives, executor
from commfuse_npu.runtime.device_streams import SideStream
from commfuse_npu.runtime.transport import Transport
from tests.late_transfers.race_detector import Module

_isend, _irecv, _operation = dist.isend, dist.irecv, dist.P2POp
_batch_isend_irecv = dist.batch_isend_irecv
_BYTE = 0x7F
"""What a buffer of whole numbers is filled with; others with NaN."""

_module: Module | None = None
"""What stands in for ``torch.cuda``, if kernels are checked for races."""
_posted: dict[int, _LateWork] = {}
"""What was not waited for, by identity."""


class LateTransferError(AssertionError):
    """A buffer was used while its transfer was under way, or HCCL does not take the call."""


def install() -> None:
    """In this process, from now on: transfers are late, and in batches unless it is asked."""
    create = Transport.create.__func__  # type: ignore[attr-defined]

    @wraps(create)
    def batched(cls: type[Transport], *args: Any, **options: Any) -> Transport:
        return create(cls, *args, **{**options, "batched": options.get("batched", True)})

    Transport.create = classmethod(batched)  # type: ignore[assignment, method-assign]
    dist.batch_isend_irecv = _late_batch
    dist.isend, dist.irecv = partial(_late_single, True), partial(_late_single, False)
    own = {dist.isend: _isend, dist.irecv: _irecv}
    dist.P2POp = lambda op, *args: _operation(own.get(op, op), *args)  # type: ignore[assignment, misc]
    collectives._all_gather = _late_collective(collectives._all_gather)
    collectives._reduce_scatter = _late_collective(collectives._reduce_scatter)
    collectives._all_to_all = _late_collective(collectives._all_to_all)


def poison(tensor: torch.Tensor) -> None:
    """Fill it with what nobody may compute with, past autograd and its version counter."""
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
    else:
        tensor.data.view(torch.uint8).fill_(_BYTE)


# ---------------------------------------------------------------------- transfers


class _LateWork:
    """The handle of what was posted together.

    Args:
        post: posts it, given the tensors in place of the caller's.
        sent, received: the caller's.
        lane: whose order it keeps.
    """

    def __init__(
        self,
        post: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[Any]],
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        lane: object,
    ) -> None:
        self._stream = None if _module is None else _module.lane(lane)
        if _module is not None:
            self._stream.wait_event(_module.recorded())
        # Those that change in place are left to the collective.
        alone = not any(_share(one, other) for one in sent for other in received)
        # For the race detector the product itself has to hold what is sent.
        self._sent = sent if alone and _module is None else ()
        self._received = received
        with self._on_lane():
            self._read = [one.detach().clone() for one in sent]
            self._arrived = [one.detach().clone() for one in received]
            for one in received if alone else ():
                poison(one)
        with _disable_current_modes():
            self._works = post(self._read, self._arrived)
        _posted[id(self)] = self

    def _on_lane(self) -> Any:
        return nullcontext() if _module is None else _module.stream(self._stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """A second call returns at once, as on HCCL, where a stream waits each time."""
        works, self._works = self._works, []
        _posted.pop(id(self), None)
        for work in works:
            work.wait() if timeout is None else work.wait(timeout)
        if works:
            with self._on_lane():
                for tensor, other in zip(self._received, self._arrived, strict=True):
                    tensor.data.copy_(other)
            with _disable_current_modes():
                for tensor, other in zip(self._sent, self._read, strict=False):
                    if not torch.equal(_bytes(tensor), _bytes(other)):
                        shape = tuple(tensor.shape)
                        raise LateTransferError(
                            f"a send buffer of shape {shape} changed before its wait()"
                        )
            if self._stream is not None:
                self._over = self._stream.clock.copy()
        if _module is not None:
            _module.current.clock |= self._over
        return True

    def is_completed(self) -> bool:
        return not self._works


def _late_single(
    sends: bool, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0
) -> _LateWork:
    def post(read: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> list[Any]:
        call, (other,) = (_isend, read) if sends else (_irecv, arrived)
        return [call(other, peer, group, tag)]

    lane = group, sends, peer
    return _LateWork(post, [tensor] if sends else [], [] if sends else [tensor], lane)


def _late_batch(operations: list[dist.P2POp]) -> list[_LateWork]:
    """In place of ``dist.batch_isend_irecv``: one handle for all, as torch_npu returns it."""
    for way in (_isend, _irecv):
        peers = [one.peer for one in operations if one.op is way]
        if len(set(peers)) < len(peers):
            raise LateTransferError(
                f"a batch with two {way.__name__} of one rank ({peers}): older versions of CANN "
                "take one each"
            )
    for one in operations:
        if not one.tensor.is_contiguous():
            raise LateTransferError(
                f"a tensor of shape {tuple(one.tensor.shape)} and strides {one.tensor.stride()} "
                "is not contiguous"
            )

    def post(read: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> list[Any]:
        others = {_isend: iter(read), _irecv: iter(arrived)}
        return _batch_isend_irecv(
            [_operation(one.op, next(others[one.op]), one.peer, one.group) for one in operations]
        )

    sent, received = ([one.tensor for one in operations if one.op is op] for op in (_isend, _irecv))
    return [_LateWork(post, sent, received, operations[0].group)]


def _late_collective(call: Callable[..., Any]) -> Callable[..., Any]:
    def late(
        out: torch.Tensor, given: torch.Tensor, *splits: Any, group: Any, async_op: bool = False
    ) -> Any:
        def post(read: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> list[Any]:
            return [call(arrived[0], read[0], *splits, group=group, async_op=True)]

        work = _LateWork(post, [given], [out], group)
        if not async_op:
            work.wait()
        return work

    return late


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, of_other = one.data_ptr(), other.data_ptr()
    return start < of_other + other.nbytes and of_other < start + one.nbytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------- side streams


def finish() -> None:
    """Let transfers end that nobody waited for."""
    for work in list(_posted.values()):
        work.wait()


@contextmanager
def streams_of(module: Module) -> Iterator[None]:
    """In this block streams are those of a module that stands in for ``torch.cuda``."""
    global _module
    own, _module = executor.side_stream, module
    executor.side_stream = partial(SideStream, module)
    try:
        yield
    finally:
        executor.side_stream, _module = own, None
