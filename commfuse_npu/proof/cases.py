"""The programs to prove: every rule with every choice of its arguments, for all schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeVar

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import (
    RULES,
    Blocks,
    BucketGather,
    BucketScatter,
    ColumnBackward,
    ExchangeBlocks,
    GatherGemm,
    GatherUse,
    GemmScatter,
    ProduceScatter,
    Rule,
)
from commfuse_npu.plan.schedule import RankSpec

__all__ = ["CHUNKS", "LANES", "Case", "cases", "rules_to_prove"]

CHUNKS = (1, 2, 3, 4)
LANES = (1, 2, 3, None)
"""``None``: the default of the schedule."""

_ALL_CHUNKS_UP_TO = 4
_ALL_ARGUMENTS_UP_TO = 8

_LINEAR = GatherGemm, GemmScatter, ColumnBackward
"""The rules that accept the shape ``collective``."""

_BLOCKS: Sequence[Blocks] = ("given", "made", "made and kept")

_One = TypeVar("_One")


class Case(NamedTuple):
    """The rule and the schedule of a set of programs, one per rank."""

    rule: Rule
    schedule: Schedule
    size: int

    def __str__(self) -> str:
        return f"{self.rule}, {self.size} ranks, {self.schedule}"

    def programs(self) -> list[Program]:
        """Compile the programs of all ranks, in rank order."""
        return [
            self.rule.program(RankSpec(self.schedule, rank, self.size)) for rank in range(self.size)
        ]


def cases(size: int, chunks: Sequence[int] = CHUNKS) -> Iterator[Case]:
    """The cases to prove for a group of ``size`` ranks.

    Every rule is combined with every shape; for up to 8 ranks with every choice of its arguments;
    for up to 4 ranks with every number of chunks.  The other options alternate: lanes, and numbers
    of rows that divide evenly, do not, or are below that of the chunks.
    """
    choices = [[*product([count], LANES, _rows(count))] for count in chunks]
    if size > _ALL_CHUNKS_UP_TO:
        choices = [[choice for group in choices for choice in group]]
    rotations = [_turns(group) for group in choices]
    for kind in RULES.values():
        numbers = range(len(rules_to_prove(kind, 1, size)))
        turns = _turns(numbers)
        shapes = [*_shapes(size), *([Schedule("collective")] if kind in _LINEAR else [])]
        for shape in shapes:
            for number in numbers if size <= _ALL_ARGUMENTS_UP_TO else [next(turns)]:
                for count, lane, rows in map(next, rotations):
                    lane = 1 if shape.shape == "collective" else lane
                    schedule = replace(shape, lanes=lane, chunks=count)
                    rule = rules_to_prove(kind, rows, size)[number]
                    yield Case(rule, schedule, size)


def _rows(chunks: int) -> list[int]:
    return sorted({1, chunks, 2 * chunks + 1})


def _turns(options: Sequence[_One]) -> Iterator[_One]:
    """Repeat all options without end, in a new random order each time (fixed seed)."""
    mixed = random.Random(0)
    while True:
        yield from mixed.sample(options, len(options))


def _shapes(size: int) -> list[Schedule]:
    nodes = [node for node in range(1, size + 1) if size % node == 0]
    return [
        Schedule(),
        Schedule(causal=True),
        *(Schedule("two_level", node_size=node) for node in nodes),
    ]


def rules_to_prove(kind: type[Rule], rows: int, size: int) -> Sequence[Rule]:
    """Rules of a kind with every choice of its fields; the schedule cuts the length ``rows``."""
    flags = False, True
    either = [pair for pair in product(flags, flags) if any(pair)]
    choices: dict[type[Rule], Sequence[Rule]] = {
        GatherGemm: [
            GatherGemm(rows, 2, 3),
            GatherGemm(rows, 2, 3, other=2),
            GatherGemm(rows, 2, other=2),
        ],
        GemmScatter: [GemmScatter(2, 3, rows)],
        ColumnBackward: [ColumnBackward(2, rows, 3, *pair) for pair in either],
        ProduceScatter: [ProduceScatter(rows, 2)],
        GatherUse: [GatherUse(rows, 2, keep) for keep in flags],
        ExchangeBlocks: [
            ExchangeBlocks(rows, 2, blocks, *pair, wgrad)
            for blocks, pair, wgrad in product(_BLOCKS, either, flags)
        ],
        BucketScatter: [
            BucketScatter(rows, 1, 1),
            BucketScatter(rows, 2, 2),
            BucketScatter(rows, size, 3),
        ],
        BucketGather: [BucketGather(rows)],
    }
    return choices[kind]
