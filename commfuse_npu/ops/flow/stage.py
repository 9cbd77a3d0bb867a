"""The order in which the chunks of a stage go through its layers.

A layer is two *parts*, attention and MLP, each from a norm to a residual sum.  Parts run chunk by
chunk; a chunk leaves a part and enters the next one when the chunk after it has been worked on, so
that its scatter and its gather are hidden, and the last one after the first of the next part::

    part p      work 0 | work 1, leave 0 | work 2, leave 1 |
    part p + 1                                     work 0, leave 2 | work 1, leave 0 | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from commfuse_npu.ops.flow.transfers import Arriving, Flow, Leaving, Weight

__all__ = ["Part", "Stage"]


class Part(Protocol):
    """Attention or MLP of a layer, chunk by chunk.

    Attributes:
        name: for errors.
        weights: of the column-parallel and of the row-parallel layer, each with whether it
            accumulates into its ``main_grad``.
    """

    name: str
    weights: Sequence[tuple[torch.Tensor, bool]]

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm, of this rank's rows of a chunk: ``[s / c, B, H]``."""

    def work(
        self, flow: Flow, arriving: Arriving, weights: Sequence[Weight], chunk: int
    ) -> Leaving:
        """From the column-parallel to the row-parallel layer."""

    def leave(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The residual sum, of this rank's rows of a chunk: ``y + hidden``."""


class Stage:
    """A pass of a sequence through parts, from where it is whole to where it is whole again.

    Equals, part by part::

        hidden = part.leave(reduce_scatter(part.work(all_gather(part.enter(hidden)))), hidden)

    Args:
        flow: with at least 2 chunks.
        hidden: ``[s, B, H]``, this rank's stripes (:mod:`.stripes`); chunks divide ``s``.
        part: the first one.

    Raises:
        ValueError: the chunks do not divide the rows.
        MismatchError: another rank has another shape or number of chunks.
        TransportError: an earlier transfer failed, or was begun and never ended.
    """

    def __init__(self, flow: Flow, hidden: torch.Tensor, part: Part) -> None:
        if hidden.shape[0] % flow.chunks:
            raise ValueError(
                f"{hidden.shape[0]} rows per rank cannot be cut into {flow.chunks} equal chunks; "
                "choose a number of chunks that divides them"
            )
        flow.check_none_open()
        rows, *widths = hidden.shape
        flow.transport.agree(
            "flow", {"rows": rows}, widths=tuple(widths), chunks=flow.chunks, dtype=hidden.dtype
        )
        self._flow = flow
        self._hidden = list(hidden.split(hidden.shape[0] // flow.chunks))
        self._arriving: dict[int, Arriving] = {}
        self._leaving: dict[int, Leaving] = {}
        self._before: Part | None = None
        for chunk in range(flow.chunks):
            self._enter(part, chunk)

    def run(self, part: Part, following: Part | None) -> None:
        """Run a part; what left it enters the following one, if there is one."""
        flow, before = self._flow, self._before
        weights = flow.weights(part.weights)
        for chunk in range(flow.chunks):
            leaving = part.work(flow, self._arriving.pop(chunk), weights, chunk)
            if chunk == 0:
                if before is not None:
                    self._leave(before, flow.chunks - 1)
                    self._enter(part, flow.chunks - 1)
            else:
                self._leave(part, chunk - 1)
                if following is not None:
                    self._enter(following, chunk - 1)
            self._leaving[chunk] = leaving
        self._before = part

    def end(self) -> torch.Tensor:
        """The hidden states, whole again: ``[s, B, H]``."""
        if self._before is not None:
            self._leave(self._before, self._flow.chunks - 1)
        return torch.cat(self._hidden)

    def _enter(self, part: Part, chunk: int) -> None:
        shard = part.enter(self._hidden[chunk])
        name = f"chunk {chunk} before {part.name}"
        self._arriving[chunk] = self._flow.gather(shard, name)

    def _leave(self, part: Part, chunk: int) -> None:
        y = self._flow.end_scatter(self._leaving.pop(chunk))
        self._hidden[chunk] = part.leave(y, self._hidden[chunk])
