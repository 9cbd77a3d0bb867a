"""The base class of rules: a rule compiles the program of an operation, and has its unfused form.

The unfused form is executable.  With the collectives of torch.distributed it is the unfused
operation (:mod:`commfuse_npu.runtime.collective_transport`).  With symbolic contents it gives the
expected results of the programs (:mod:`commfuse_npu.proof.outcomes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules.pieces import Piece
from commfuse_npu.plan.schedule import RankSpec

__all__ = ["IN_FLIGHT", "RULES", "Carrier", "Rule", "forget_programs"]

IN_FLIGHT = 2
"""Chunks, or stacks of pieces, that are sent at the same time, each with its own memory."""

_MOST_COMPILED = 4096
"""Most programs that are cached, of 10 to 60 KiB each; every new length adds some."""


class Carrier(Protocol):
    """Executes the unfused form of a rule for one rank.

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
                for buckets, whose unfused form is proved but not executed on collectives.
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


RULES: dict[str, type[Rule]] = {}
"""All rules by name, to compile a program from the name and arguments in a recorded run."""


class Rule:
    """An operation: the fields of the dataclass are the sizes that its programs depend on.

    Equal rules with equal :class:`RankSpec` have one program, which is cached.
    """

    def __init_subclass__(cls) -> None:
        RULES[cls.__name__] = cls

    def build(self, b: Builder) -> None:
        """Append the instructions of one rank."""
        raise NotImplementedError

    def unfused(self, c: Carrier) -> None:
        """Compute what the operation equals."""
        raise NotImplementedError

    def program(self, spec: RankSpec) -> Program:
        """The program of one rank."""
        return _compiled(self, spec)

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


@lru_cache(maxsize=_MOST_COMPILED)
def _compiled(rule: Rule, spec: RankSpec) -> Program:
    b = Builder(spec)
    rule.build(b)
    return b.build(rule)


def forget_programs() -> None:
    """Empty the cache of programs."""
    _compiled.cache_clear()
