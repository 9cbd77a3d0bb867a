"""Queries and keys as the attention operators of torch_npu take them, and their results back.

A run of queries of one sequence is ``SBH``; with packed documents it is ``TND``, piece after piece.

Legend: ``B`` batch, ``A`` and ``G`` heads, ``D`` features; ``T`` rows of all samples one after the
other, those of sample 0 first.  Only packed documents of several samples are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from commfuse_npu.kernels.cpu import Piece

__all__ = ["PackedRun", "WholeRun", "layout_of"]


class WholeRun:
    """Queries ``[Sq, B, A * D]`` and keys ``[Sk, B, G * D]``.

    Attributes:
        layout: ``input_layout`` of the operators.
        query_ends, key_ends: cumulative lengths, ``actual_seq_qlen`` and ``actual_seq_kvlen``.
    """

    layout = "SBH"
    query_ends: list[int] | None = None
    key_ends: list[int] | None = None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``[Sq, B, A, D]``."""
        return x.flatten(2)

    def like_queries(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`queries`, of the shape of ``like``."""
        return x.view(like.shape)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``[Sk, B, G, D]``."""
        return x.flatten(2)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add to ``total`` ``[Sk, B, G, D]`` what belongs to :meth:`keys` of it."""
        total.add_(x.view(total.shape))


class PackedRun(WholeRun):
    """Queries and keys ``[T, A, D]`` of packed documents.

    Args:
        pieces: as :func:`~commfuse_npu.kernels.cpu.attention_forward` takes them.
        batch: how many samples there are.
    """

    layout = "TND"

    def __init__(self, pieces: Sequence[Piece], batch: int) -> None:
        self.query_ends = list(accumulate(_length(piece.queries) for piece in pieces))
        self.key_ends = list(accumulate(_length(piece.keys) for piece in pieces))
        first: dict[int, int] = {}
        for piece in pieces:
            first.setdefault(piece.sample, piece.keys.start)
        # The keys of a sample that any query sees.
        self._seen = [slice(first[sample], None) for sample in range(batch)]

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).flatten(0, 1)

    def like_queries(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (like.shape[1], -1)).transpose(0, 1).contiguous()

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        samples = [x[seen, sample] for sample, seen in enumerate(self._seen)]
        return samples[0] if len(samples) == 1 else torch.cat(samples)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        samples = [total[seen, sample] for sample, seen in enumerate(self._seen)]
        for rows, part in zip(samples, x.split([len(rows) for rows in samples]), strict=True):
            rows.add_(part)


def layout_of(pieces: Sequence[Piece] | None, batch: int) -> WholeRun:
    """Of a run of queries, with pieces or without."""
    return WholeRun() if pieces is None else PackedRun(pieces, batch)


def _length(rows: slice) -> int:
    length: int = rows.stop - rows.start
    return length
