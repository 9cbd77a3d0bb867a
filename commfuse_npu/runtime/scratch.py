"""Scratch memory that is used again, and the views of it that programs have.

Allocating tens of megabytes per operation costs page faults on CPU and fragments the caching
allocator on a device, and so does making the views of it anew.  An arena is lent to one program at
a time and comes back when all its transfers have been waited for; one that an error leaves in the
air never comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from commfuse_npu.plan.instructions import Span
from commfuse_npu.plan.program import Program, Stretch

__all__ = ["Arena", "ScratchPool", "view_of"]

_MOST_VIEWS = 64
"""Programs whose views are kept per arena."""

_Views = dict[Span, torch.Tensor]


def view_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """The rows of a matrix that a span means: ``[rows, columns]``, or a run of them per entry of a
    third, first dimension."""
    _, start, stop, columns, times, stride = span
    if times != 1:
        step = tensor.stride(0)
        return tensor.as_strided(
            (times, stop - start, tensor.shape[1]),
            (stride * step, step, tensor.stride(1)),
            tensor.storage_offset() + start * step,
        )
    if columns is not None:
        return tensor[start:stop, columns[0] : columns[1]]
    return tensor[start:stop]


class Arena:
    """A stretch of memory.

    Args:
        key: dtype, device and stream.

    Attributes:
        known: the :meth:`views` that were made.
    """

    def __init__(
        self, key: Hashable, elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.key = key
        # Never an inference tensor: it will be lent to operations outside inference mode too.
        with torch.inference_mode(False):
            self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.elements, self.nbytes = elements, self.memory.nbytes
        self.known: OrderedDict[tuple[Program, Stretch], _Views] = OrderedDict()

    def views(self, program: Program, stretch: Stretch) -> _Views:
        """Make the program's spans of a stretch of scratch."""
        if len(self.known) >= _MOST_VIEWS:
            self.known.popitem(last=False)
        found: _Views = {}
        with torch.inference_mode(False):
            for name, (its, offset, rows, columns) in program.layout.items():
                if its == stretch:
                    whole = self.memory.as_strided((rows, columns), (columns, 1), offset)
                    found |= {span: view_of(whole, span) for span in program.spans.get(name, ())}
        self.known[program, stretch] = found
        return found


class ScratchPool:
    """Arenas that nobody uses.

    A buffer is used again in the order of the stream that used it: each stream has arenas of its
    own.

    Args:
        keep_bytes: how much idle memory is kept; the arenas not used for longest are freed.

    Attributes:
        idle_bytes: what is kept and not lent to anybody.
        lent: how many arenas are in use, or left in the air by an error.
    """

    def __init__(self, keep_bytes: int = 512 << 20) -> None:
        self._keep_bytes = keep_bytes
        self._idle: OrderedDict[int, Arena] = OrderedDict()
        self.idle_bytes = 0
        self.lent = 0

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Arena:
        """An arena of at least so many elements."""
        self.lent += 1
        key = dtype, device, None if device.type == "cpu" else _stream(device)
        found: Arena | None = None
        for arena in reversed(self._idle.values()):
            # One that is much too long is worth more to somebody else.
            fits = elements <= arena.elements <= 2 * elements and arena.key == key
            if fits and (found is None or arena.elements < found.elements):
                found = arena
        if found is not None:
            del self._idle[id(found)]
            self.idle_bytes -= found.nbytes
            return found
        return Arena(key, elements, dtype, device)

    def give_back(self, arena: Arena) -> None:
        self.lent -= 1
        self._idle[id(arena)] = arena
        self.idle_bytes += arena.nbytes
        while self.idle_bytes > self._keep_bytes:
            _, freed = self._idle.popitem(last=False)
            self.idle_bytes -= freed.nbytes

    def clear(self) -> None:
        """Free all idle memory."""
        self._idle.clear()
        self.idle_bytes = 0


def _stream(device: torch.device) -> Hashable:
    return torch.get_device_module(device.type).current_stream(device).stream_id
