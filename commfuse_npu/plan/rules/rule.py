"""What a rule is: the program of an operation, and the lines that the operation equals.

The lines are executable.  Carried by the collectives of torch.distributed they are the unfused form
(:mod:`commfuse_npu.runtime.collective_transport`); carried by names of contents they say what has
to come out of the programs (:mod:`commfuse_npu.proof.outcomes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, Protocol

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules.pieces import Piece
from commfuse_npu.plan.schedule import Place

__all__ = ["IN_FLIGHT", "MOST_COMPILED", "RULES", "Carrier", "Rule", "rule"]

IN_FLIGHT = 2
"""Chunks, or stacks of pieces, that have memory on their way to other ranks."""

MOST_COMPILED = 4096
"""Programs that are kept; their number grows with the lengths of sequences."""


class Carrier(Protocol):
    """What carries out the lines that an operation equals, for one rank.

    Matrices are whatever the carrier makes of them.  ``out`` is a buffer of the operation that a
    result is written to.  Where work is cut, ``pieces`` says how, in the order of the program;
    ``first`` and ``last`` are the rows that the first and the last piece has to take: the own
    block's, behind which the first transfer, or before which the last one, is hidden.
    """

    place: Place

    def given(self, buffer: str, rows: int, columns: int) -> Any:
        """A buffer that the operation brings along."""

    def own_block(self, whole: Any) -> Any:
        """The rows of ``[n * s, columns]`` that are this rank's, ``[s, columns]``."""

    def all_gather(self, shard: Any, *, out: str | None = None) -> Any:
        """``[s, columns]`` of all ranks, ``[n * s, columns]``."""

    def all_to_all(self, blocks: Any, *, out: str | None = None) -> Any:
        """``[n * s, columns]``: block d goes to rank d."""

    def reduce_scatter(self, whole: Any, *, out: str, finish: bool = False) -> None:
        """``[n * s, columns]`` to ``[s, columns]``.

        Args:
            out: of so many rows, or of all ranks' rows, of which the own ones are written.
            finish: the sum is ended by the work ``finish(out, sum of the others, own)``.
        """

    def all_reduce(self, whole: Any, parts: Sequence[slice], *, out: str) -> None:
        """The sum over the ranks, part by part reduce-scattered and gathered."""

    def gemm(
        self,
        a: Any,
        b: Any,
        pieces: Sequence[Piece],
        *,
        out: str | None = None,
        first: slice | None = None,
        last: slice | None = None,
    ) -> Any:
        """``a @ b``."""

    def make(self, rows: int, columns: int, pieces: Sequence[slice], *, out: str | None) -> Any:
        """A matrix whose rows the work ``make(out, run)`` makes; the last ones are the own."""

    def use(self, matrix: Any, pieces: Sequence[slice], *, first: slice | None = None) -> None:
        """The work ``use(piece, run)`` takes all rows."""

    def wgrad(
        self,
        *factors: Any,
        pieces: Sequence[Sequence[slice]] | None = None,
        first: slice | None = None,
    ) -> None:
        """The work ``wgrad(*factors)``, by runs of rows if there are ``pieces``."""


class Rule:
    """Compiles the program of a place, once per arguments.

    Attributes:
        lines: what the operation equals; it takes a :class:`Carrier` and the rule's arguments.
    """

    lines: Callable[..., None]

    def __init__(self, make: Callable[..., Builder]) -> None:
        self.name, self.__doc__ = make.__name__, make.__doc__
        names = tuple(signature(make).parameters)[1:]

        @lru_cache(maxsize=MOST_COMPILED)
        def compiled(place: Place, *arguments: Any) -> Program:
            about = self.name, place.schedule, *arguments
            return make(place, *arguments).build(about, names)

        self._compiled = compiled
        self.cache_clear = compiled.cache_clear

    def __call__(self, place: Place, *arguments: Any) -> Program:
        return self._compiled(place, *arguments)

    def equals(self, lines: Callable[..., None]) -> Callable[..., None]:
        """Decorates the lines that the operation equals."""
        self.lines = lines
        return lines


RULES: dict[str, Rule] = {}
"""By name, for who has the name and the arguments of a rule (a recorded run)."""


def rule(make: Callable[..., Builder]) -> Rule:
    """A rule that is known by its function's name."""
    made = RULES[make.__name__] = Rule(make)
    return made
