"""Transfers whose results are available only after their ``wait()``."""

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
"""Fill byte of integer buffers; floating-point buffers are filled with NaN."""

_module: Module | None = None
"""The replacement of ``torch.cuda`` while kernels are checked for races."""
_posted: dict[int, _LateWork] = {}
"""Works that were not awaited yet, by ``id``."""


class LateTransferError(AssertionError):
    """A buffer was used during its transfer, or HCCL does not support the call."""


def install() -> None:
    """Make the transfers of this process late; transports post in batches by default."""
    create = Transport.create.__func__  # type: ignore[attr-defined]

    @wraps(create)
    def batched(cls: type[Transport], *args: Any, **options: Any) -> Transport:
        return create(cls, *args, **{**options, "batched": options.get("batched", True)})

    Transport.create = classmethod(batched)  # type: ignore[assignment, method-assign]
    dist.batch_isend_irecv = _late_batch
    dist.isend, dist.irecv = partial(_late_single, True), partial(_late_single, False)
    executor.post_send = partial(_late_post, True)
    executor.post_receive = partial(_late_post, False)
    originals = {dist.isend: _isend, dist.irecv: _irecv}
    dist.P2POp = lambda op, *args: _operation(originals.get(op, op), *args)  # type: ignore[assignment, misc]
    collectives._all_gather = _late_collective(collectives._all_gather)
    collectives._reduce_scatter = _late_collective(collectives._reduce_scatter)
    collectives._all_to_all = _late_collective(collectives._all_to_all)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with an invalid value, without autograd and its version counter."""
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
    else:
        tensor.data.view(torch.uint8).fill_(_BYTE)


# ---------------------------------------------------------------------- transfers


class _LateWork:
    """The handle of transfers that were posted together.

    Args:
        post: posts the transfers with copies of the caller's tensors.
        sent, received: the caller's tensors.
        lane: key of the lane, which completes its transfers in order.
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
        # An in-place collective shares memory: its buffers are not poisoned.
        alone = not any(_share(source, target) for source in sent for target in received)
        # Under the race detector the product itself has to keep the send buffer alive.
        self._sent = sent if alone and _module is None else ()
        self._received = received
        with self._on_lane():
            self._read = [tensor.detach().clone() for tensor in sent]
            self._arrived = [tensor.detach().clone() for tensor in received]
            for tensor in received if alone else ():
                poison(tensor)
        with _disable_current_modes():
            self._works = post(self._read, self._arrived)
        _posted[id(self)] = self

    def _on_lane(self) -> Any:
        return nullcontext() if _module is None else _module.stream(self._stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """A second call returns immediately, as on HCCL, where a stream waits each time."""
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


def _late_post(
    sends: bool, group: Any, tensors: list[torch.Tensor], peer: int, tag: int
) -> _LateWork:
    """Replaces ``ProcessGroup.send`` and ``recv``; ``peer`` is a rank of the group."""
    return _late_single(sends, tensors[0], dist.get_global_rank(group, peer), group, tag)


def _late_batch(operations: list[dist.P2POp]) -> list[_LateWork]:
    """Replaces ``dist.batch_isend_irecv``; returns one handle for all, like torch_npu."""
    for way in (_isend, _irecv):
        peers = [p2p.peer for p2p in operations if p2p.op is way]
        if len(set(peers)) < len(peers):
            raise LateTransferError(
                f"a batch with two {way.__name__} of one rank ({peers}): older versions of CANN "
                "take one each"
            )
    for p2p in operations:
        if not p2p.tensor.is_contiguous():
            raise LateTransferError(
                f"a tensor of shape {tuple(p2p.tensor.shape)} and strides {p2p.tensor.stride()} "
                "is not contiguous"
            )

    def post(read: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> list[Any]:
        buffers = {_isend: iter(read), _irecv: iter(arrived)}
        return _batch_isend_irecv(
            [_operation(p2p.op, next(buffers[p2p.op]), p2p.peer, p2p.group) for p2p in operations]
        )

    sent, received = ([p2p.tensor for p2p in operations if p2p.op is op] for op in (_isend, _irecv))
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
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------- side streams


def finish() -> None:
    """Wait for all transfers that were not awaited."""
    for work in list(_posted.values()):
        work.wait()


@contextmanager
def streams_of(module: Module) -> Iterator[None]:
    """Use the streams of ``module``, which replaces ``torch.cuda``, within this block."""
    global _module
    original, _module = executor.side_stream, module
    executor.side_stream = partial(SideStream, module)
    try:
        yield
    finally:
        executor.side_stream, _module = original, None
