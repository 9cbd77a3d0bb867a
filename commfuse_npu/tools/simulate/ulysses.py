"""Attention under Ulysses context parallelism, from the projection to heads to the one back.

A rank has some rows of the sequence for all heads, and attends with some heads over the whole
sequence; an all-to-all leads there and another one back.  Unfused each is exposed as a whole.
Fused (``--commfuse-ulysses``, :mod:`commfuse_npu.ops.ulysses`), with the projections where
tensor parallelism leaves their weights whole::

    forward   project heads of r+1, .. | wait | attend rows of r+1, .., own | project own, r-1, ..
              -> heads                        -> rows
    backward  dgrad heads of r+1, .., own | wgrad | attend own, r-1, .. | dgrad own, r-1, .. | wgrad
              -> heads                                                  -> rows

Under tensor parallelism the projections stay outside, and with them the all-to-all of queries, keys
and values is exposed.

Legend: ``N`` ranks, ``block`` rows of a rank's part of the sequence, of ``N * block``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from commfuse_npu.hardware.machine import ITEM_BYTES, SUM_BYTES
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Compute
from commfuse_npu.plan.rules import exchange
from commfuse_npu.tools.simulate.llama import BACKWARD_ATTENTION, LayerShape, Queries
from commfuse_npu.tools.simulate.rank import Rank, Width, Work

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
        """Add the forward to a rank's launches."""
        block, machine, hidden = self.shape.rows, rank.machine, self.shape.hidden
        heads, out = self._heads(rank), self._out(rank)
        attend = _piecewise(self._attend(rank))

        def project(one: Compute, _: Width) -> float:
            return machine.gemm(_rows(one), hidden, heads)

        def join(one: Compute, _: Width) -> float:
            """A part of the inner dimension, added to a sum; else nothing."""
            if not self.projects:
                return 0.0
            return machine.gemm(_rows(one), out, hidden, result_bytes=2 * SUM_BYTES)

        if self.projects:
            program = exchange(rank.place("qkv"), block, heads, "made", False, True, False)
            rank.run("qkv", program, {"received": heads}, {"make": project})
        else:
            rank.need(rank.collective("qkv", block * heads * ITEM_BYTES))
        if self.fused is None:
            rank.compute("attention", self._attend(rank)(slice(0, rank.size * block)))
            rank.need(rank.collective("out", block * out * ITEM_BYTES))
            return
        place = rank.place("attention", causal=True)
        program = exchange(place, block, out, "made and kept", True, self.projects, False)
        columns = {"blocks": out, "received": out}
        rank.run("attention", program, columns, {"make": attend, "use": join})

    def backward(self, rank: Rank) -> None:
        """Add the backward."""
        block, machine, hidden = self.shape.rows, rank.machine, self.shape.hidden
        heads, out = self._heads(rank), self._out(rank)
        attend = _piecewise(self._attend(rank, BACKWARD_ATTENTION))

        def project(one: Compute, _: Width) -> float:
            return machine.gemm(_rows(one), hidden, out)

        def wgrad(_: Compute, __: Width) -> float:
            return machine.gemm(hidden, block, hidden)

        def dgrad(one: Compute, _: Width) -> float:
            return machine.gemm(_rows(one), heads, hidden, result_bytes=2 * SUM_BYTES)

        if self.fused is None:
            rank.need(rank.collective("out", block * out * ITEM_BYTES))
            whole = slice(0, rank.size * block)
            rank.compute("attention", self._attend(rank, BACKWARD_ATTENTION)(whole))
        elif self.projects:
            name = "proj and attention"
            program = exchange(rank.place(name), block, out, "made", True, False, True)
            rank.run(name, program, {}, {"make": project, "wgrad": wgrad, "use": attend})
        else:
            place = rank.place("attention", causal=True)
            program = exchange(place, block, out, "given", True, False, False)
            rank.run("attention", program, {"blocks": out}, {"use": attend})
        if not self.projects:
            rank.need(rank.collective("qkv", block * heads * ITEM_BYTES))
            return
        program = exchange(rank.place("qkv"), block, heads, "given", True, True, False)
        rank.run("qkv", program, {"blocks": heads, "received": heads}, {"use": dgrad})
        rank.compute("qkv wgrad", machine.gemm(self.shape.qkv, block, hidden))

    def _heads(self, rank: Rank) -> int:
        """Features of queries, keys and values of one rank's heads."""
        width = self.shape.qkv + 2 * self.key_value * (self.repeats - 1)
        return round(width / self.shape.ranks / rank.size)

    def _out(self, rank: Rank) -> int:
        """Features of the attention of one rank's heads."""
        return self.shape.hidden // self.shape.ranks // rank.size

    def _attend(self, rank: Rank, factor: float = 1.0) -> Queries:
        """Of some rows of the whole sequence, with this rank's heads."""
        shape = self.shape
        whole = replace(shape, sequence=shape.attended, ranks=shape.ranks * rank.size)
        return whole.attention(rank.machine, factor)


def _piecewise(attend: Queries) -> Work:
    def seconds(one: Compute, _: Width) -> float:
        assert one.run is not None
        return attend(one.run)

    return seconds


def _rows(one: Compute) -> int:
    assert one.run is not None
    return int(one.run.stop - one.run.start)
