"""Positional embeddings of the whole sequence, from the part that each rank has.

Under context parallelism a rank computes the embeddings of its own rows.  Once heads are exchanged
for rows it has all rows, in the order of the ranks: the parts of all ranks, one after the other,
whatever the parts are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from commfuse_npu.runtime.collectives import all_gather_rows

__all__ = ["WholePositions"]

_KEPT = 4


@dataclass(frozen=True)
class _Gathered:
    """A part as it was when it was gathered.  Kept alive, so that no other gets its memory."""

    part: torch.Tensor
    version: int
    whole: torch.Tensor

    def serves(self, part: torch.Tensor) -> bool:
        mine = self.part
        return (
            _memory(mine) == _memory(part)
            and mine.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
            and self.version == part._version
        )


class WholePositions:
    """Gathers parts, and remembers the last few.

    All layers of a forward have the same part, and recomputation has the same memory under another
    name: those find what was gathered.  Whether one does depends on what the program does with its
    tensors, never on their values, and so is the same on every rank, as it has to be in front of a
    collective.
    """

    def __init__(self) -> None:
        self._known: list[_Gathered] = []
        self._group: dist.ProcessGroup | None = None

    def of(self, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """``[s, ...]`` of each rank as ``[N * s, ...]``.

        Args:
            part: no gradient flows through it.
        """
        if group is not self._group:
            self._group, self._known = group, []
        countable = not part.is_inference()  # else nobody counts what happens to it
        if countable:
            for known in self._known:
                if known.serves(part):
                    return known.whole
        with torch.no_grad():
            whole = all_gather_rows(part, group)
        if countable:
            gathered = _Gathered(part.detach(), part._version, whole)
            self._known = [gathered, *self._known[: _KEPT - 1]]
        return whole


def _memory(x: torch.Tensor) -> tuple[object, ...]:
    """What part of its storage a tensor is."""
    return x.dtype, x.device, tuple(x.shape), x.stride(), x.storage_offset()
