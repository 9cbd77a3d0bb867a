"""Attention in runs of queries: masks, checks, options, forward and backward.

It calls a kernel once per run, in the order of a program, so that a fused op and its unfused form
add the gradients of keys and values in the same order.

With packed documents a query sees the keys of its own document up to its own position.  A run of
queries may begin and end inside a document.  It needs the keys from the start of its first document
on, and none before.

Legend: ``S`` queries and keys, ``B`` batch, ``A`` query heads, ``G`` key heads, ``D`` features of a
head.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from commfuse_npu.kernels import AttentionPiece, kernels_for
from commfuse_npu.kernels.cpu import check_attention
from commfuse_npu.ops.call import AnyTransport, check_call, check_sequence, check_tensors
from commfuse_npu.ops.linear_options import LinearOptions, check_type

__all__ = [
    "AttentionRuns",
    "Documents",
    "checked_attention",
    "keys_of",
    "options_for_attention",
]


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
        self.length = length
        self.batch = batch
        self._pieces: dict[tuple[int, int], tuple[slice, tuple[AttentionPiece, ...]]] = {}
        before = 0
        for end in ends:
            if not before <= end <= length * batch:
                raise ValueError(
                    f"documents: end {end} follows {before}; ends have to rise from 1 to at most "
                    f"{length * batch}, {batch} samples of {length}"
                )
            before = end
        # The boundaries inside each sample, from 0 to its length.
        self._bounds: list[list[int]] = []
        bounds = list(dict.fromkeys([0, *ends, length * batch]))
        for sample in range(batch):
            first = sample * length
            last = first + length
            at_end = bisect_left(bounds, last)
            if bounds[at_end] != last:
                raise ValueError(
                    f"documents: none ends at {last}, with sample {sample}: one goes on in the "
                    f"next sample of {length}; end it there, or pass one sample"
                )
            inside = bounds[bisect_left(bounds, first) : at_end + 1]
            self._bounds.append([bound - first for bound in inside])

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, length: int, batch: int = 1) -> Documents:
        """From the cumulative lengths of flash attention, which begin with 0.

        Args:
            cu_seqlens: ``[documents + 1]``, integers, such as ``cu_seqlens_q``.  The host waits for
                a tensor on a device.

        Raises:
            ValueError: the first number is not 0, or as for the ends themselves.
        """
        first, *ends = cu_seqlens.tolist()
        if first != 0:
            raise ValueError(
                f"documents: cu_seqlens begins with {first}; it has to begin with 0 (ends alone "
                "are Documents(ends, length, batch))"
            )
        return cls(ends, length, batch)

    @property
    def whole(self) -> bool:
        """Whether each sample is one document."""
        return all(len(bounds) == 2 for bounds in self._bounds)

    def pieces(self, run: slice) -> tuple[slice, tuple[AttentionPiece, ...]]:
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

    def _cut(self, run: slice) -> tuple[slice, tuple[AttentionPiece, ...]]:
        spans = [
            (bisect_right(bounds, run.start) - 1, bisect_left(bounds, run.stop))
            for bounds in self._bounds
        ]
        begins = (bounds[low] for bounds, (low, _) in zip(self._bounds, spans, strict=True))
        first = min(begins, default=run.start)
        pieces = []
        for sample, (low, high) in enumerate(spans):
            bounds = self._bounds[sample]
            # The run cuts its first and its last document.
            cuts = [run.start, *bounds[low + 1 : high], run.stop]
            pieces += [
                AttentionPiece(
                    sample,
                    slice(start - run.start, stop - run.start),
                    slice(begin - first, stop - first),
                )
                for begin, start, stop in zip(bounds[low:high], cuts, cuts[1:], strict=False)
            ]
        return slice(first, run.stop), tuple(pieces)


def keys_of(
    run: slice, causal: bool, documents: Documents | None
) -> tuple[slice, tuple[AttentionPiece, ...] | None]:
    """The keys that a run of queries may see, and the pieces of its documents for the kernel."""
    if documents is not None:
        return documents.pieces(run)
    return slice(0, run.stop) if causal else slice(None), None


class AttentionRuns:
    """Attention of one set of heads in runs of queries, forward and backward.

    Args:
        causal: whether a query sees only the keys up to its own position.
        documents: packed documents; a query sees only keys of its own.  Needs ``causal``.
        scale: of the scores; ``D ** -0.5`` by default.

    Attributes:
        attended: the whole output, ``[S, B, A, D]``, if it is kept; else ``None``.
    """

    attended: torch.Tensor | None

    def __init__(
        self, causal: bool, documents: Documents | None = None, scale: float | None = None
    ) -> None:
        self._documents = documents
        self._options: dict[str, Any] = {"causal": causal, "scale": scale}
        # Tensors of all runs in order, and the slice of them for each run, by its first row.
        self._statistics: list[torch.Tensor] = []
        self._where: dict[int, slice] = {}

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> None:
        """Begin the forward for ``q`` ``[S, B, A, D]``, ``k`` and ``v`` ``[S, B, G, D]``.

        Args:
            keep: whether to keep what a backward needs.
        """
        self._q = q.contiguous()
        self._k = k.contiguous()
        self._v = v.contiguous()
        self._kernels = kernels_for(q.device)
        self.attended = torch.empty_like(self._q) if keep else None

    def forward(self, run: slice) -> torch.Tensor:
        """The output for these queries, ``[rows, B, A, D]``."""
        keys, pieces = keys_of(run, self._options["causal"], self._documents)
        attended, statistics = self._kernels.attention_forward(
            self._q[run], self._k[keys], self._v[keys], **self._options, pieces=pieces
        )
        if self.attended is not None:
            self.attended[run] = attended
            first = len(self._statistics)
            self._where[run.start] = slice(first, first + len(statistics))
            self._statistics += statistics
        return attended

    def saved(self) -> tuple[torch.Tensor | None, ...]:
        """End the forward; returns the tensors for the backward, ``attended`` first.

        It keeps none of them, because saved-tensor hooks may move them elsewhere.
        """
        tensors = self.attended, self._q, self._k, self._v, *self._statistics
        self._forget()
        return tensors

    def resume(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin the backward, with what :meth:`saved` returned."""
        self.attended, self._q, self._k, self._v, *self._statistics = tensors
        # The gradients of keys and values are summed in fp32.
        wide = torch.promote_types(self._k.dtype, torch.float32)
        sums = (torch.zeros_like(x, dtype=wide) for x in (self._k, self._v))
        self._grads = [torch.empty_like(self._q), *sums]

    def backward(self, grad: torch.Tensor, run: slice) -> None:
        """Run the backward for these queries; ``grad`` has the elements of their output."""
        assert self.attended is not None
        keys, pieces = keys_of(run, self._options["causal"], self._documents)
        out = self.attended[run]
        grad_q, grad_k, grad_v = self._grads
        grad_q[run] = self._kernels.attention_backward(
            grad.view(out.shape),
            self._q[run],
            self._k[keys],
            self._v[keys],
            out,
            self._statistics[self._where[run.start]],
            grad_k[keys],
            grad_v[keys],
            **self._options,
            pieces=pieces,
        )

    def gradients(self) -> tuple[torch.Tensor, ...]:
        """End the backward; returns the gradients of q, k and v."""
        grads = tuple(grad.to(self._q.dtype) for grad in self._grads)
        self._forget()
        return grads

    def _forget(self) -> None:
        self.attended = None
        self._statistics = []
        self._grads = []
        del self._q, self._k, self._v


_TUNED_CHUNKS = 4
"""Used instead of tuning: attention is long enough to be cut, and on paced links 4 chunks were the
fastest, or within the spread, at every ratio of work to transfers."""


@lru_cache(maxsize=256)
def options_for_attention(options: LinearOptions, costs_rise: bool) -> LinearOptions:
    """The options for an op with attention: no ``collective``, 4 chunks in place of tuning, and if
    ``costs_rise`` the order of causal blocks; ``two_level`` keeps its own.

    Args:
        costs_rise: whether later queries see more keys.
    """
    schedule = options.schedule
    if schedule.shape == "collective":
        schedule = replace(schedule, shape="shifted")
    if costs_rise and schedule.shape == "shifted":
        schedule = replace(schedule, causal=True)
    if options.tuning is not None:
        schedule = replace(schedule, chunks=_TUNED_CHUNKS)
    return replace(options, schedule=schedule, tuning=None)


def checked_attention(
    name: str,
    transport: AnyTransport,
    options: LinearOptions,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    documents: Documents | None,
) -> Documents | None:
    """Check ``q_SBAD``, ``k_SBGD``, ``v_SBGD`` and the documents for the ranks of a transport.

    Returns:
        The documents; ``None`` if each sample is a single one.

    Raises:
        TypeError: an argument has another type, or the dtype is not floating-point.
        ValueError: shapes, dtypes or documents do not fit each other, or the sequence is not
            divisible.
    """
    check_call(name, options)
    check_tensors(name, q=q, k=k, v=v)
    check_attention(q, k, v)
    if not q.is_floating_point():
        raise TypeError(f"{name}: q is {q.dtype}; attention needs a floating-point dtype")
    length, batch = q.shape[:2]
    if length != k.shape[0]:
        raise ValueError(
            f"{name}: {length} queries and {k.shape[0]} keys; self-attention has as many of one "
            "as of the other"
        )
    check_sequence(name, length, transport.size)
    if documents is None:
        return None
    check_type(name, "documents", documents, Documents, "Documents(ends, length, batch)")
    if not causal:
        raise ValueError(f"{name}: documents are causal; pass causal=True, or no documents")
    if (documents.length, documents.batch) != (length, batch):
        raise ValueError(
            f"{name}: documents of {documents.batch} samples of {documents.length} are given for "
            f"{batch} of {length}; make them for those"
        )
    return None if documents.whole else documents
