"""A pool of scratch memory, and cached views of it per program.

Allocating tens of megabytes per operation costs page faults on a CPU and fragments the caching
allocator of a device; creating views costs host time.  An arena is lent to one program at a time
and returned when all its transfers have been waited for.  After an error it is never returned,
because transfers may still write to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from commfuse_npu.plan.instructions import Span
from commfuse_npu.plan.program import Program, Region

__all__ = ["Arena", "ScratchPool", "view_of"]

_MOST_VIEWS = 64
"""Most programs whose views are cached per arena."""

_Views = dict[Span, torch.Tensor]


def view_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """The view of a matrix for a span: ``[rows, columns]``, or ``[times, rows, columns]`` if it has
    several runs of rows."""
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
    """One allocation of scratch memory.

    Args:
        key: dtype, device and stream.

    Attributes:
        known: cache of :meth:`views`.
    """

    def __init__(
        self, key: Hashable, elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.key = key
        # Not an inference tensor: operations outside inference mode use the arena, too.
        with torch.inference_mode(False):
            self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.elements = elements
        self.nbytes = self.memory.nbytes
        self.known: OrderedDict[tuple[Program, Region], _Views] = OrderedDict()

    def views(self, program: Program, region: Region) -> _Views:
        """Create and cache the views for the program's spans of a region of scratch."""
        if len(self.known) >= _MOST_VIEWS:
            self.known.popitem(last=False)
        views: _Views = {}
        with torch.inference_mode(False):
            for name, (home, offset, rows, columns) in program.layout.items():
                if home == region:
                    whole = self.memory.as_strided((rows, columns), (columns, 1), offset)
                    views |= {span: view_of(whole, span) for span in program.spans.get(name, ())}
        self.known[program, region] = views
        return views


class ScratchPool:
    """Arenas that no program uses.

    Each stream has its own arenas, because stream order makes it safe to reuse one.

    Args:
        keep_bytes: limit on idle memory; beyond it the least recently used arenas are freed.

    Attributes:
        idle_bytes: memory of the arenas in the pool.
        lent: number of arenas in use, or lost to an error.
    """

    def __init__(self, keep_bytes: int = 512 << 20) -> None:
        self._keep_bytes = keep_bytes
        self._idle: OrderedDict[int, Arena] = OrderedDict()
        self.idle_bytes = 0
        self.lent = 0

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Arena:
        """An arena of at least ``elements`` elements, and at most twice as many if reused."""
        self.lent += 1
        key = dtype, device, None if device.type == "cpu" else _stream(device)
        best: Arena | None = None
        shortest = 2 * elements  # a longer arena is left for a larger request
        for arena in reversed(self._idle.values()):
            if elements <= arena.elements <= shortest and arena.key == key:
                best = arena
                shortest = arena.elements - 1
        if best is not None:
            del self._idle[id(best)]
            self.idle_bytes -= best.nbytes
            return best
        return Arena(key, elements, dtype, device)

    def give_back(self, arena: Arena) -> None:
        """Return an arena; frees the least recently used ones beyond the limit."""
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
