"""Buffers of the baselines that are used again: they allocate no more often than what they are
compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

__all__ = ["BufferPool"]


class BufferPool:
    """Receive and send buffers that are used again.

    Allocating tens of megabytes per operation costs page faults on CPU and fragments the caching
    allocator on a device.  A buffer is lent to one operation and comes back when all its transfers
    have been waited for; one that an error leaves in the air never comes back.

    On a device a buffer is reused in the order of the stream that used it; lend to one stream only.

    Args:
        keep_bytes: how much idle memory is kept; the buffers not used for longest are freed.
    """

    def __init__(self, keep_bytes: int = 512 << 20) -> None:
        self._keep_bytes = keep_bytes
        self._idle: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor with undefined contents; perhaps the first rows of a longer one."""
        shape = tuple(shape)
        found: torch.Tensor | None = None
        for buffer in reversed(self._idle.values()):
            alike = (buffer.shape[1:], buffer.dtype, buffer.device) == (shape[1:], dtype, device)
            # One that is much too long is worth more to somebody else.
            if alike and shape[0] <= buffer.shape[0] <= 2 * shape[0]:
                if found is None or buffer.shape[0] < found.shape[0]:
                    found = buffer
                if found.shape[0] == shape[0]:
                    break
        if found is not None:
            del self._idle[id(found)]
            if found.shape[0] == shape[0]:
                return found
            part = found[: shape[0]]
            self._parts[id(part)] = part, found
            return part
        # Never an inference tensor: it will be lent to operations outside inference mode too.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=device)

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        for given in buffers:
            _, buffer = self._parts.pop(id(given), (given, given))
            self._idle[id(buffer)] = buffer
        idle = self.idle_bytes
        while idle > self._keep_bytes:
            _, buffer = self._idle.popitem(last=False)
            idle -= buffer.nbytes

    @property
    def idle_bytes(self) -> int:
        """What is kept and not lent to anybody."""
        return sum(buffer.nbytes for buffer in self._idle.values())

    def clear(self) -> None:
        """Free all idle buffers."""
        self._idle.clear()

    def __len__(self) -> int:
        return len(self._idle)
