"""Attention under Ulysses context parallelism, from the projection to heads to the one back.

A rank has some rows of the sequence for all heads, and attends with some heads over the whole
sequence; an all-to-all leads there and another one back.  Unfused each is exposed as a whole.
Fused (``--commfuse-ulysses``, :mod:`commfuse_npu.ops.ulysses`), with the projections where
tensor parallelism leaves their weights whole::

    forward   project heads of r+1, .. | wait | attend rows of r+1, .., own | project own, r-1, ..
              -> heads                        -> rows
    backward  dgrad heads of r+1, ..   | attend own, r-1, .. | wgrad | dgrad, wgrad own, r-1, ..
              -> heads                                       -> rows

Under tensor parallelism the projections stay outside, and with them the all-to-all of queries, keys
and values is exposed.

Legend: ``N`` ranks, ``block`` rows of a rank's part of the sequence, of ``N * block``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate.llama import BACKWARD_ATTENTION, SUM_BYTES, LayerShape
from commfuse_npu.tools.simulate.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.rank import AllToAll, Rank, Work

__all__ = ["Ulysses"]


@dataclass(frozen=True)
class Ulysses:
    """Attention of one layer on a context-parallel group.

    Attributes:
        shape: of the layer, for one tensor-parallel group.
        fused: the schedule of the exchanges; ``None`` for plain collectives.
        key_value: width of all keys, or of all values.
        repeats: how often each key head is sent, 1 unless there are fewer of them than ranks.
    """

    shape: LayerShape
    fused: Schedule | None
    key_value: float = 0.0
    repeats: float = 1.0

    @property
    def projects(self) -> bool:
        """Whether the projections are part of it: not of heads that are repeated before."""
        return self.fused is not None and self.shape.ranks == 1 and self.repeats == 1

    def forward(self, rank: Rank) -> None:
        """Add the forward to a rank's program."""
        block, machine = self.shape.rows, rank.machine
        heads, out = self._heads(rank), self._out(rank)
        causal = self.fused and self.fused.for_causal_blocks(rank.size)
        if self.projects and self.fused is not None:
            there = AllToAll(rank, "qkv", block, heads, "last", self.fused)
            there.produce(
                lambda run: machine.gemm(_rows(run), self.shape.hidden, heads / ITEM_BYTES)
            )
            rank.need(there.finish())
        else:
            rank.need(rank.collective("qkv", "all_to_all", block, heads))
        attend = self._attend(rank)
        if causal is None:
            rank.compute("attention", attend(slice(0, rank.size * block)))
            rank.need(rank.collective("out", "all_to_all", block, out))
            return
        back = AllToAll(rank, "attention", block, out, "last", causal)
        back.produce(attend)
        back.consume(self._proj(rank) if self.projects else _nothing)
        rank.need(back.finish())

    def backward(self, rank: Rank) -> None:
        """Add the backward."""
        block, machine = self.shape.rows, rank.machine
        heads, out = self._heads(rank), self._out(rank)
        attend = self._attend(rank, BACKWARD_ATTENTION)
        hidden, qkv = self.shape.hidden, heads / ITEM_BYTES
        if self.fused is None:
            rank.need(rank.collective("out", "all_to_all", block, out))
            rank.compute("attention", attend(slice(0, rank.size * block)))
        elif self.projects:
            there = AllToAll(rank, "proj and attention", block, out, "last", self.fused)
            there.produce(lambda run: machine.gemm(_rows(run), hidden, out / ITEM_BYTES))
            there.consume(attend)
            rank.compute("proj wgrad", machine.gemm(hidden, block, hidden), there.finish())
        else:
            causal = self.fused.for_causal_blocks(rank.size)
            there = AllToAll(rank, "attention", block, out, "first", causal)
            there.consume(attend)
            rank.need(there.finish())
        if self.fused is None or not self.projects:
            rank.need(rank.collective("qkv", "all_to_all", block, heads))
            return

        def project(run: slice) -> float:
            rows = _rows(run)
            dgrad = machine.gemm(rows, qkv, hidden, result_bytes=2 * SUM_BYTES)
            return dgrad + machine.gemm(qkv, rows, hidden, result_bytes=2 * SUM_BYTES)

        back = AllToAll(rank, "qkv", block, heads, "first", self.fused)
        back.consume(project)
        rank.need(back.finish())

    def _heads(self, rank: Rank) -> float:
        """Bytes per row of queries, keys and values of one rank's heads."""
        width = self.shape.qkv + 2 * self.key_value * (self.repeats - 1)
        return width / self.shape.ranks / rank.size * ITEM_BYTES

    def _out(self, rank: Rank) -> float:
        """Bytes per row of the attention of one rank's heads."""
        return self.shape.hidden / self.shape.ranks / rank.size * ITEM_BYTES

    def _attend(self, rank: Rank, factor: float = 1.0) -> Work:
        """Of some rows of the whole sequence, with this rank's heads."""
        shape = self.shape
        whole = replace(shape, sequence=shape.attended, ranks=shape.ranks * rank.size)
        return whole.attention(rank.machine, factor)

    def _proj(self, rank: Rank) -> Work:
        """A part of the inner dimension, added to a sum."""
        inner, hidden = self.shape.hidden / rank.size, self.shape.hidden
        return lambda run: rank.machine.gemm(_rows(run), inner, hidden, result_bytes=2 * SUM_BYTES)


def _rows(run: slice) -> int:
    return int(run.stop - run.start)


def _nothing(run: slice) -> float:
    return 0.0
