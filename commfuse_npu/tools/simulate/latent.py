"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): its projections, on one rank.

Queries, and keys together with values, pass through a narrow product that each rank computes for
its own rows, a norm, an all-gather of the narrow rows, and a wide product that is split by heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.rank import Rank

__all__ = ["Latent"]

_LAUNCHES = 21, 18
"""Launches besides the products, forward and backward: norms, splits, copies of the shared rotary
key to every head (counted by hand in MindSpeed-LLM 26.1.0)."""


@dataclass(frozen=True)
class Latent:
    """Widths of the narrow products, and of one head.

    Attributes:
        heads: of all ranks.
        queries: width of the narrow queries; 0 if queries are computed by one product.
        keys: width of the narrow keys and values, without the rotary part.
        own, rotary, value: widths of a head's query and key without the rotary part, of the rotary
            part, and of a head's value.
        ranks: of the tensor-parallel group.
    """

    heads: int
    queries: int
    keys: int
    own: int
    rotary: int
    value: int
    ranks: int

    @property
    def attended(self) -> float:
        """Total width of queries and values, which determines the FLOP of attention."""
        return float(self.heads * (self.own + self.rotary + self.value))

    @property
    def kept(self) -> int:
        """Width of what the backward needs: narrow rows, queries, keys and values of all heads."""
        wide = self.heads * (2 * (self.own + self.rotary) + self.own + 2 * self.value)
        return (self.queries + self.keys + self.rotary) * self.ranks + wide

    @property
    def parameters(self) -> tuple[int, int]:
        """Number of parameters per feature of the hidden states, and of the wide products."""
        query = self.heads * (self.own + self.rotary)
        narrow = self.keys + self.rotary + (self.queries or query)
        wide = self.keys * self.heads * (self.own + self.value) + self.queries * query
        return narrow + self.heads * self.value, wide

    def _products(self, rows: int, held: int, hidden: int) -> list[tuple[int, int, int]]:
        """Rows, input width and output width of each product."""
        query = self.heads * (self.own + self.rotary) // self.ranks
        key_value = self.heads * (self.own + self.value) // self.ranks
        narrow = [(held, hidden, self.keys + self.rotary), (rows, self.keys, key_value)]
        if self.queries:
            return [(held, hidden, self.queries), (rows, self.queries, query), *narrow]
        return [(rows, hidden, query), *narrow]

    def forward(self, rank: Rank, rows: int, held: int, hidden: int) -> None:
        """Add the forward for ``rows`` rows of all ranks, of which this rank holds ``held``."""
        for number, sizes in enumerate(self._products(rows, held, hidden)):
            rank.compute(f"latent {number}", rank.machine.gemm(*sizes))
        self._gather(rank, held)
        self._rest(rank, rows, 0)

    def backward(self, rank: Rank, rows: int, held: int, hidden: int) -> None:
        """Add the backward: dgrad and wgrad of each product."""
        self._rest(rank, rows, 1)
        for number, (tokens, inputs, outputs) in enumerate(self._products(rows, held, hidden)):
            rank.compute(f"latent {number} backward", rank.machine.gemm(tokens, outputs, inputs))
            seconds = rank.machine.gemm(outputs, tokens, inputs)
            rank.compute(f"latent {number} wgrad", seconds, launches=2)
        self._gather(rank, held)

    def _gather(self, rank: Rank, held: int) -> None:
        width = self.queries + self.keys + self.rotary
        if rank.size > 1:
            rank.need(rank.collective("latent gather", float(held * width * ITEM_BYTES)))

    def _rest(self, rank: Rank, rows: int, way: int) -> None:
        width = self.heads * (2 * (self.own + self.rotary) + self.value) // self.ranks
        seconds = rank.machine.memory(4.0 * rows * width * ITEM_BYTES)
        rank.compute("latent heads", seconds, launches=_LAUNCHES[way])
