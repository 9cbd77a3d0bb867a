"""The programs to prove: every rule with every choice of its arguments, for all schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeVar

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import RULES
from commfuse_npu.plan.schedule import RankSpec

__all__ = ["CHUNKS", "LANES", "Case", "arguments", "cases"]

CHUNKS = (1, 2, 3, 4)
LANES = (1, 2, 3, None)
"""``None``: the default of the schedule."""

_ALL_CHUNKS_UP_TO = 4
_ALL_ARGUMENTS_UP_TO = 8

_LINEAR = ("gather_gemm", "gemm_scatter", "column_backward")
"""The rules that accept the shape ``collective``."""

_One = TypeVar("_One")


class Case(NamedTuple):
    """The rule, arguments and schedule of a set of programs, one per rank."""

    rule: str
    arguments: tuple[object, ...]
    schedule: Schedule
    size: int
    batched: bool

    def __str__(self) -> str:
        values = ", ".join(map(str, self.arguments))
        posting = "in batches" if self.batched else "one by one"
        return f"{self.rule}({values}), {self.size} ranks, {posting}, {self.schedule}"

    def programs(self) -> list[Program]:
        """Compile the programs of all ranks, in rank order."""
        rule = RULES[self.rule]
        return [
            rule(RankSpec(self.schedule, rank, self.size, self.batched), *self.arguments)
            for rank in range(self.size)
        ]


def cases(size: int, chunks: Sequence[int] = CHUNKS) -> Iterator[Case]:
    """The cases to prove for a group of ``size`` ranks.

    Every rule is combined with every shape, batched and not; for up to 8 ranks with every choice of
    its arguments; for up to 4 ranks with every number of chunks.  The other options alternate:
    lanes, and numbers of rows that divide evenly, do not, or are below that of the chunks.
    """
    choices = [[*product([count], LANES, _rows(count))] for count in chunks]
    if size > _ALL_CHUNKS_UP_TO:
        choices = [[choice for group in choices for choice in group]]
    rotations = [_turns(group) for group in choices]
    for name in RULES:
        numbers = range(len(arguments(name, 1, size)))
        turns = _turns(numbers)
        shapes = [*_shapes(size), *([Schedule("collective")] if name in _LINEAR else [])]
        for shape, batched in product(shapes, (True, False)):
            for number in numbers if size <= _ALL_ARGUMENTS_UP_TO else [next(turns)]:
                for count, lane, rows in map(next, rotations):
                    lane = 1 if shape.shape == "collective" else lane
                    schedule = replace(shape, lanes=lane, chunks=count)
                    values = arguments(name, rows, size)[number]
                    yield Case(name, values, schedule, size, batched)


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


def arguments(rule: str, rows: int, size: int) -> list[tuple[object, ...]]:
    """Every choice of a rule's arguments; ``rows`` is the length that the schedule cuts."""
    flags = False, True
    either = [pair for pair in product(flags, flags) if any(pair)]
    choices: dict[str, list[tuple[object, ...]]] = {
        "gather_gemm": [(rows, 2, 3, 0), (rows, 2, 3, 2), (rows, 2, 0, 2)],
        "gemm_scatter": [(2, 3, rows)],
        "column_backward": [(2, rows, 3, *pair) for pair in either],
        "produce_scatter": [(rows, 2)],
        "gather_use": [(rows, 2, keep) for keep in flags],
        "exchange": [
            (rows, 2, blocks, *pair, wgrad)
            for blocks, pair, wgrad in product(("given", "made", "made and kept"), either, flags)
        ],
        "bucket_scatter": [(rows, 1, 1), (rows, 2, 2), (rows, size, 3)],
        "bucket_gather": [(rows,)],
    }
    return choices[rule]
