"""Batches of torch.distributed whose data arrive at the ``wait()``, and not before."""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.runtime.transport import Transport

__all__ = ["LateTransferError", "install", "poison"]

_batch_isend_irecv = dist.batch_isend_irecv
_BYTE = 0x7F
"""What a buffer of whole numbers is filled with; others with NaN."""


class LateTransferError(AssertionError):
    """A buffer was used while its transfer was under way, or HCCL does not take the call."""


def install() -> None:
    """In this process, from now on: every transport posts batches, and they are late."""
    create = Transport.create.__func__  # type: ignore[attr-defined]

    @wraps(create)
    def batched(cls: type[Transport], *args: Any, **options: Any) -> Transport:
        return create(cls, *args, **{**options, "batched": True})

    Transport.create = classmethod(batched)  # type: ignore[assignment, method-assign]
    dist.batch_isend_irecv = _late_batch


def poison(tensor: torch.Tensor) -> None:
    """Fill it with what nobody may compute with, past autograd and its version counter."""
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
    else:
        tensor.data.view(torch.uint8).fill_(_BYTE)


def _late_batch(operations: list[dist.P2POp]) -> list[_LateBatch]:
    """In place of ``dist.batch_isend_irecv``: one handle for all, as torch_npu returns it."""
    for way in (dist.isend, dist.irecv):
        peers = [one.peer for one in operations if one.op is way]
        if len(set(peers)) < len(peers):
            raise LateTransferError(
                f"a batch with two {way.__name__} of one rank ({peers}): older versions of CANN "
                "take one each"
            )
    posted = []
    transfers = []
    for one in operations:
        if not one.tensor.is_contiguous():
            raise LateTransferError(
                f"a tensor of shape {tuple(one.tensor.shape)} and strides {one.tensor.stride()} "
                "is not contiguous"
            )
        other = one.tensor.detach().clone()
        if one.op is dist.isend:
            posted.append(dist.P2POp(dist.isend, other, one.peer, one.group))
        else:
            poison(one.tensor)
            posted.append(dist.P2POp(dist.irecv, other, one.peer, one.group))
        transfers.append((one.op is dist.isend, one.tensor, other))
    return [_LateBatch(_batch_isend_irecv(posted), transfers)]


class _LateBatch:
    """The handle of a batch.

    Args:
        transfers: whether it is a send, the caller's tensor, and what gloo sends or fills.
    """

    def __init__(
        self, works: list[Any], transfers: list[tuple[bool, torch.Tensor, torch.Tensor]]
    ) -> None:
        self._works, self._transfers = works, transfers

    def wait(self, timeout: timedelta | None = None) -> bool:
        """A second call returns at once, as on HCCL."""
        transfers, self._transfers = self._transfers, []
        if not transfers:
            return True
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        for sent, tensor, other in transfers:
            if not sent:
                tensor.data.copy_(other)
            elif not torch.equal(_bytes(tensor), _bytes(other)):
                raise LateTransferError(
                    f"a send buffer of shape {tuple(tensor.shape)} changed before its wait()"
                )
        return True

    def is_completed(self) -> bool:
        return not self._transfers


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
