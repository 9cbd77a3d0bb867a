"""Attention on one rank of a tensor-parallel group: latent projections, context parallelism.

Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): queries, and keys together with values, pass
through a narrow product that each rank computes for its own rows, a norm, an all-gather of the
narrow rows, and a wide product that is split by heads.

Context parallelism: with a ring, keys and values circulate while attention uses them: all rounds
but the last have a transfer to the next rank beside their attention.  With Ulysses, a rank has some
rows of the sequence for all heads, and attends with some heads over the full sequence: a blocking
all-to-all precedes attention, and another follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from commfuse_npu.tools.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.engine import Links
from commfuse_npu.tools.simulate.rank import EVENTS, RING, Rank, collective_seconds

if TYPE_CHECKING:
    from commfuse_npu.tools.simulate.llama import LayerShape

_BACKWARD = 2.5
"""FLOP of attention's backward per FLOP of its forward."""
_LATENT = 21, 18
"""Launches of latent attention besides the products, forward and backward: norms, splits, copies of
the shared rotary key to every head (counted by hand in MindSpeed-LLM 26.1.0)."""
_ROUND = 6, 10
"""Launches per round of the ring, forward and backward: slices, attention, and the merge with the
results of earlier rounds (MindSpeed 26.1.0, counted by hand with its fused update)."""
_COPIES = 8
"""Launches beside Ulysses' attention: a copy before and after each exchange of queries, keys,
values and outputs (MindSpeed 26.1.0, counted by hand)."""


@dataclass(frozen=True)
class Latent:
    """Widths of the narrow products, and of one head.

    Attributes:
        heads: of all ranks.
        queries: width of the narrow queries; 0 if queries are computed by one product.
        keys: width of the narrow keys and values, without the rotary part.
        own, rotary, value: widths of a head's query and key without the rotary part, of the rotary
            part, and of a head's value.
    """

    heads: int
    queries: int
    keys: int
    own: int
    rotary: int
    value: int

    @property
    def attended(self) -> float:
        """Total width of queries and values, which determines the FLOP of attention."""
        return self.heads * (self.own + self.rotary + self.value)

    @property
    def narrow(self) -> int:
        """Width of the narrow rows."""
        return self.queries + self.keys + self.rotary

    @property
    def wide(self) -> int:
        """Width of the queries, keys and values of all heads."""
        return self.heads * (2 * (self.own + self.rotary) + self.value)

    def kept(self, ranks: int) -> int:
        """Width of what the backward needs: narrow rows, queries, keys and values of all heads."""
        return self.narrow * ranks + self.wide + self.heads * (self.own + self.value)

    @property
    def parameters(self) -> tuple[int, int]:
        """Number of parameters per feature of the hidden states, and of the wide products."""
        query = self.heads * (self.own + self.rotary)
        narrow = self.keys + self.rotary + (self.queries or query)
        wide = self.keys * self.heads * (self.own + self.value) + self.queries * query
        return narrow + self.heads * self.value, wide

    def _products(
        self, rank: Rank, rows: int, held: int, hidden: int
    ) -> list[tuple[int, int, int]]:
        """Rows, input width and output width of each product."""
        query = self.heads * (self.own + self.rotary) // rank.size
        key_value = self.heads * (self.own + self.value) // rank.size
        narrow = [(held, hidden, self.keys + self.rotary), (rows, self.keys, key_value)]
        if self.queries:
            return [(held, hidden, self.queries), (rows, self.queries, query), *narrow]
        return [(rows, hidden, query), *narrow]

    def forward(self, rank: Rank, rows: int, held: int, hidden: int) -> None:
        """Add the forward for ``rows`` rows of all ranks, of which this rank holds ``held``."""
        for number, sizes in enumerate(self._products(rank, rows, held, hidden)):
            rank.gemm(f"latent {number}", *sizes)
        self._gather(rank, held)
        rank.elementwise("latent heads", 4 * rows * (self.wide // rank.size), _LATENT[0])

    def backward(self, rank: Rank, rows: int, held: int, hidden: int) -> None:
        """Add the backward: dgrad and wgrad of each product."""
        rank.elementwise("latent heads", 4 * rows * (self.wide // rank.size), _LATENT[1])
        for number, sizes in enumerate(self._products(rank, rows, held, hidden)):
            tokens, inputs, outputs = sizes
            rank.gemm(f"latent {number} backward", tokens, outputs, inputs)
            if not rank.lora:
                rank.gemm(f"latent {number} wgrad", outputs, tokens, inputs, launches=2)
        self._gather(rank, held)

    def _gather(self, rank: Rank, held: int) -> None:
        if rank.size > 1:
            rank.need(rank.collective("latent gather", held * self.narrow * ITEM_BYTES))


def attend(rank: Rank, shape: LayerShape, way: int) -> None:
    """Add attention with its transfers; ``way``: 0 forward, 1 backward."""
    name = ("attention", "attention backward")[way]
    seconds = shape.attention(rank.machine, _BACKWARD if way else 1.0)
    if shape.contexts == 1 or rank.variant.kind == "compute":
        rank.compute(name, seconds)
    elif shape.ulysses:
        exchanges = ("qkv", shape.rows * _heads(shape), 3), ("out", shape.rows * shape.inner, 1)
        first, last = exchanges[:: -1 if way else 1]
        _exchange(rank, shape, *first)
        rank.compute(name, seconds, launches=1 + _COPIES)
        _exchange(rank, shape, *last)
    else:
        # Backward, gradients of keys and values go around, too.
        passed = 1 + way
        waits = tuple[int, ...]()
        size = passed * shape.rows * 2 * shape.key_value / shape.ranks * ITEM_BYTES
        # On the slowest links of the ring.
        links = Links(rank.machine, shape.contexts, shape.ranks)
        levels = [links.level(at, (at + 1) % shape.contexts) for at in range(shape.contexts)]
        transfer = max(level.latency + size / level.rate for level in levels)
        for remaining in reversed(range(shape.contexts)):
            before = waits
            if remaining:
                waits = rank.send(RING, transfer, [(rank.rank, rank.rank)], before, 0, "cp")
            each = seconds / shape.contexts
            events = EVENTS * passed
            rank.compute(name, each, before, _ROUND[way], posts=passed, events=events)


def _heads(shape: LayerShape) -> float:
    """Width of queries, keys and values, with a key head for each of this group's ranks."""
    repeats = max(1.0, shape.ranks * shape.contexts / shape.groups)
    return shape.qkv // shape.ranks + 2 * shape.key_value * (repeats - 1) / shape.ranks


def _exchange(rank: Rank, shape: LayerShape, name: str, numbers: float, collectives: int) -> None:
    """Deal ``numbers`` elements of every rank out to all ranks."""
    links = Links(rank.machine, shape.contexts, shape.ranks)
    seconds = collective_seconds(links, numbers / shape.contexts * ITEM_BYTES)
    rank.need(rank.elsewhere(f"exchange of {name}", seconds, collectives, "cp"))
