"""Attention masks: which keys a query sees, for the whole sequence and for a run of queries.

With packed documents a query sees the keys of its own document up to its own position.  A run of
queries may begin and end inside a document.  It needs the keys from the start of its first document
on, and none before.

Legend: ``S`` rows of the sequence, queries and keys, ``B`` samples of the batch, ``q_SBAD`` a
tensor of that shape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from commfuse_npu.kernels import Piece

__all__ = ["AttentionMask", "Documents"]


class Documents:
    """Where the documents of a batch end.

    Args:
        ends: cumulative over all samples; sample b has the positions ``b * S .. (b + 1) * S``.
            MindSpeed's ``actual_seq_len``, ``actual_seq_qlen`` of ``npu_fusion_attention`` in the
            layout ``TND``.  A repeated end counts once; rows after the last end are a document.
        length: S.
        batch: B.

    Raises:
        ValueError: the ends decrease or are outside the batch, or a document extends into the next
            sample.
    """

    def __init__(self, ends: Sequence[int], length: int, batch: int = 1) -> None:
        self.length, self.batch = length, batch
        self._pieces: dict[tuple[int, int], tuple[slice, tuple[Piece, ...]]] = {}
        before = 0
        for end in ends:
            if not before <= end <= length * batch:
                raise ValueError(
                    f"documents: end {end} follows {before}; ends have to rise from 1 to at most "
                    f"{length * batch}, {batch} samples of {length}"
                )
            before = end
        # The ends inside each sample; the last is its length.
        self._ends: list[list[int]] = []
        all_ends = {*ends, length * batch}
        for sample in range(batch):
            first, last = sample * length, (sample + 1) * length
            if last not in all_ends:
                raise ValueError(
                    f"documents: none ends at {last}, with sample {sample}: one goes on in the "
                    f"next sample of {length}; end it there, or pass one sample"
                )
            self._ends.append(sorted(end - first for end in all_ends if first < end <= last))

    @property
    def whole(self) -> bool:
        """Whether each sample is one document."""
        return all(len(ends) == 1 for ends in self._ends)

    def pieces(self, run: slice) -> tuple[slice, tuple[Piece, ...]]:
        """The keys that a run of queries sees, as the kernels take them.

        Args:
            run: rows of the sequence, in all samples.

        Returns:
            The keys from the start of the earliest document with a query in the run to the last
            query; and the pieces, relative to the first row of the run and the first of those keys.
        """
        entry = self._pieces.get((run.start, run.stop))
        if entry is None:
            entry = self._pieces[run.start, run.stop] = self._cut(run)
        return entry

    def _cut(self, run: slice) -> tuple[slice, tuple[Piece, ...]]:
        documents = [
            (sample, begin, end)
            for sample, ends in enumerate(self._ends)
            for begin, end in _within(ends, run)
        ]
        first = min((begin for _, begin, _ in documents), default=run.start)
        pieces = []
        for sample, begin, end in documents:
            start, stop = max(begin, run.start), min(end, run.stop)
            queries = slice(start - run.start, stop - run.start)
            pieces.append(Piece(sample, queries, slice(begin - first, stop - first)))
        return slice(first, run.stop), tuple(pieces)


def _within(ends: list[int], run: slice) -> list[tuple[int, int]]:
    """``(start, end)`` of each document with rows in a run."""
    index = bisect_right(ends, run.start)
    begin = ends[index - 1] if index else 0
    documents = []
    while begin < run.stop:
        documents.append((begin, ends[index]))
        begin = ends[index]
        index += 1
    return documents


class AttentionMask(NamedTuple):
    """The mask of an op with attention.

    Attributes:
        causal: whether a query sees only the keys up to its own position.
        documents: packed documents; a query sees only keys of its own.  Needs ``causal``.
        hidden: bool, ``[B, 1, S, S]`` or ``[1, 1, S, S]``, True where a query (third dimension)
            does not see a key (fourth); not with documents.
    """

    causal: bool
    documents: Documents | None = None
    hidden: torch.Tensor | None = None

    def checked(self, name: str, q: torch.Tensor) -> AttentionMask:
        """Check the mask for ``q_SBAD``; drops documents if each sample is a single one.

        Raises:
            ValueError: the mask does not fit.
        """
        documents, hidden = self.documents, self.hidden
        length, batch = q.shape[:2]
        if documents is not None:
            if not self.causal or hidden is not None:
                raise ValueError(
                    f"{name}: documents are causal, and have no other mask; pass causal=True and "
                    "no hidden, or leave the documents out and put their ends into hidden"
                )
            if (documents.length, documents.batch) != (length, batch):
                raise ValueError(
                    f"{name}: documents of {documents.batch} samples of {documents.length} are "
                    f"given for {batch} of {length}; make them for those"
                )
            return self._replace(documents=None) if documents.whole else self
        shapes = [(b, 1, length, length) for b in (batch, 1)]
        if hidden is not None and (
            hidden.dtype != torch.bool or hidden.shape not in shapes or hidden.device != q.device
        ):
            raise ValueError(
                f"{name}: hidden is {hidden.dtype} {tuple(hidden.shape)} on {hidden.device}; it "
                f"has to be torch.bool {shapes[0]} or {shapes[1]} on {q.device}"
            )
        return self

    @property
    def costs_rise(self) -> bool:
        """Whether later queries see more keys; with documents all see about the same number."""
        return self.causal and self.documents is None

    def of(self, run: slice) -> tuple[slice, dict[str, Any]]:
        """The keys that these queries may see, and the kernel's keyword arguments for the mask."""
        keys = slice(0, run.stop) if self.causal else slice(None)
        arguments: dict[str, Any] = {"causal": self.causal}
        if self.documents is not None:
            keys, arguments["pieces"] = self.documents.pieces(run)
        if self.hidden is not None:
            arguments["hidden"] = self.hidden[:, :, run, keys]
        return keys, arguments
