"""Defines a rule: it compiles the program of an operation, and has the lines that it equals.

The lines are executable.  With the collectives of torch.distributed they are the unfused operation
(:mod:`commfuse_npu.runtime.collective_transport`).  With symbolic contents they give the expected
results of the programs (:mod:`commfuse_npu.proof.outcomes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, Protocol

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules.pieces import Piece
from commfuse_npu.plan.schedule import RankSpec

__all__ = ["IN_FLIGHT", "RULES", "Carrier", "Rule"]

IN_FLIGHT = 2
"""Chunks, or stacks of pieces, that are sent at the same time, each with its own memory."""

_MOST_COMPILED = 512
"""Most programs of a rule that are cached, of 10 to 60 KiB each; every new length adds some."""


class Carrier(Protocol):
    """Executes the lines of a rule for one rank.

    The type of a matrix is up to the carrier.  ``out`` is the operation's buffer for the result.
    ``pieces`` are the rows of each call of a work, in the order of the program.  ``first`` and
    ``last`` are the rows that its first and its last call have to take: those of the own block,
    which overlap with the first or the last transfer.
    """

    spec: RankSpec

    def given(self, buffer: str, rows: int, columns: int) -> Any:
        """An input buffer of the operation, ``[rows, columns]``."""

    def own_block(self, whole: Any) -> Any:
        """This rank's block ``[s, columns]`` of ``[n * s, columns]``."""

    def all_gather(self, shard: Any, *, out: str | None = None) -> Any:
        """``[s, columns]`` of every rank to ``[n * s, columns]``."""

    def all_to_all(self, blocks: Any, *, out: str | None = None) -> Any:
        """``[n * s, columns]``: block d goes to rank d, and rank r's block arrives as block r."""

    def reduce_scatter(self, whole: Any, *, out: str, finish: bool = False) -> None:
        """``[n * s, columns]`` to ``[s, columns]``.

        Args:
            out: has ``s`` rows; with ``finish`` it is ``whole``, whose own block is written.
            finish: whether the work ``finish(out, sum of the others, own)`` completes the sum; only
                for buckets, whose lines are proved but not executed on collectives.
        """

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
        """A matrix computed by calls of the work ``make(out, run)``, the own block last."""

    def use(self, matrix: Any, pieces: Sequence[slice], *, first: slice | None = None) -> None:
        """Call the work ``use(piece, run)`` on all rows."""

    def wgrad(self, *factors: Any) -> None:
        """Call the work ``wgrad(*factors)``."""


RULES: dict[str, Rule] = {}
"""All rules by name, to compile a program from the name and arguments in a recorded run."""


class Rule:
    """A decorator: compiles the program for a :class:`RankSpec` and arguments, and caches it.

    Attributes:
        lines: computes what the operation equals, from a :class:`Carrier` and the arguments.
    """

    lines: Callable[..., None]

    def __init__(self, make: Callable[..., Builder]) -> None:
        self.name = make.__name__
        self.__doc__ = make.__doc__
        names = tuple(signature(make).parameters)[1:]
        RULES[self.name] = self

        @lru_cache(maxsize=_MOST_COMPILED)
        def compiled(spec: RankSpec, *arguments: Any) -> Program:
            description = self.name, spec.schedule, *arguments
            return make(spec, *arguments).build(description, names)

        self._compiled = compiled
        self.cache_clear = compiled.cache_clear

    def __call__(self, spec: RankSpec, *arguments: Any) -> Program:
        return self._compiled(spec, *arguments)

    def equals(self, lines: Callable[..., None]) -> None:
        """Decorator that sets :attr:`lines`."""
        self.lines = lines
