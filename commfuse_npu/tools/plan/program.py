"""``commfuse-npu plan RULE``: the program of one rank, as text."""

from __future__ import annotations

import argparse
from typing import Any

from commfuse_npu.plan import PlanError, RankSpec, Schedule, rules
from commfuse_npu.tools.option_types import positive, whole

__all__ = ["SHOWN", "add_program_options", "print_program"]

SHOWN: dict[str, Any] = {
    "ranks": 4, "rank": 0, "shape": "shifted", "lanes": None, "chunks": 1, "taper": 1.0,
    "node_size": None, "rows": 64, "columns": 64,
}  # fmt: skip
"""Defaults of a program; the parser has none, so that options without effect can be detected."""

_MOST_RANKS, _MOST_ROWS = 1024, 1 << 24


def add_program_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of :data:`SHOWN`."""
    show = parser.add_argument_group("a program")
    kinds: dict[str, Any] = {
        "shape": str, "taper": positive, "ranks": whole(2, _MOST_RANKS), "rank": whole(0)
    }  # fmt: skip
    for name, default in SHOWN.items():
        text = "" if default is None else f"default {default}"
        kind = kinds.get(name, whole(1, _MOST_ROWS))
        show.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)


def print_program(rule: str, arguments: argparse.Namespace) -> int:
    """Print the program of one rank for a rule.

    Raises:
        PlanError: the rank, the number of lanes or the schedule is invalid.
    """
    values = {name: value for name in SHOWN if (value := getattr(arguments, name)) is not None}
    options = SHOWN | values
    rank, size, rows, columns = (options.pop(name) for name in ("rank", "ranks", "rows", "columns"))
    if rank >= size:
        raise PlanError(f"--rank {rank} is not one of --ranks {size}; choose 0 to {size - 1}")
    lanes = options["lanes"]
    if lanes is not None and lanes >= size:
        raise PlanError(
            f"--lanes {lanes}: {size} ranks have {size - 1} peers; choose 1 to {size - 1} lanes"
        )
    shapes: dict[str, tuple[object, ...]] = {
        "gather_gemm": (rows, columns, columns, None, 0),
        "gemm_scatter": (rows, columns, columns),
        "column_backward": (rows, columns, columns, True, True),
        "gemm_all_reduce": (rows * size, columns, columns),
        "produce_scatter": (rows, columns),
        "gather_use": (rows, columns, True),
        "exchange": (rows, columns, "made", True, False, False),
        "sharded_forward": (rows, columns),
        "sharded_backward": (rows, columns, True, True),
        "bucket_scatter": (rows, size - 1, 2),
        "bucket_gather": (rows,),
    }
    print(rules.RULES[rule](RankSpec(Schedule(**options), rank, size, True), *shapes[rule]))
    return 0
