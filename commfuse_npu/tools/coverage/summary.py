"""Counts over the launches of a folder, as a table and as lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from commfuse_npu.tools.coverage.verdict import Coverage
from commfuse_npu.tools.markdown import table_row

__all__ = ["counts", "lines", "table"]

_COLUMNS = ("launches", "full", "partial", "refused", "TP 1", "LoRA", "another overlap", "else")
_EXPERTS = "mixture of experts"
_HEAD = ("folder", *_COLUMNS, _EXPERTS, "--commfuse-dp alone")


def table(launches: Sequence[Coverage]) -> list[str]:
    """A row per folder, and one for all.

    A launch that is refused for more than one reason counts for the first of LoRA, another overlap,
    another option and TP 1.
    """
    folders: dict[str, list[Coverage]] = {}
    for launch in launches:
        folders.setdefault(str(PurePath(launch.script).parent), []).append(launch)
    rows = [*folders.items(), ("all", list(launches))]
    return [
        table_row(_HEAD),
        table_row(["---", *["---:"] * (len(_HEAD) - 1)]),
        *(table_row([name, *map(str, _row(found))]) for name, found in rows),
    ]


def _row(launches: Sequence[Coverage]) -> list[int]:
    found: Counter[str] = Counter(launches=len(launches))
    for launch in launches:
        found.update((launch.verdict, launch.kind))
    return [
        *(found[name] for name in _COLUMNS),
        sum(launch.layout.experts for launch in launches),
        sum(launch.data_parallel_alone for launch in launches),
    ]


def counts(launches: Sequence[Coverage]) -> dict[str, Any]:
    """The same figures by name, and what :func:`lines` says."""
    apart = [one for one in launches if one.layout.tensor > 1 and one.kind in ("", "else")]
    taken = [one for one in launches if one.verdict != "refused"]
    exchanging = [one for one in launches if one.layout.algorithm == "ulysses_cp_algo"]
    flows = [name for one in launches[:1] for name in one.flags if "-flow " in name]

    def fitting(some: Iterable[Coverage], flag: str) -> int:
        return sum(not one.flags[flag] for one in some)

    return {
        **dict(zip(_HEAD[1:], _row(launches), strict=True)),
        "TP above 1, neither LoRA nor another overlap": len(apart),
        "of these full": sum(one.verdict == "full" for one in apart),
        "Ulysses launches": len(exchanging),
        "of these --commfuse-ulysses fits": fitting(
            [one for one in exchanging if not one.excluded], "--commfuse-ulysses"
        ),
        "and without what excludes --use-commfuse": fitting(exchanging, "--commfuse-ulysses"),
        "not refused": len(taken),
        "of these with short blocks": sum(one.short for one in taken),
        "with transfers of TP, EP or CP": sum(one.overlap.transfers for one in launches),
        "--commfuse-fb-overlap passes as typed": sum(not one.overlap.obstacle for one in launches),
        "and without the flags of another overlap": sum(
            not one.overlap.without for one in launches
        ),
        **{
            f"of these {flag} passes": fitting(taken, flag)
            for flag in ("--commfuse-attention", *flows, "--commfuse-dp")
        },
    }


def lines(launches: Sequence[Coverage]) -> list[str]:
    """What the table does not have."""
    found = counts(launches)
    passes = [
        f"{name.removeprefix('of these ')} in {count}"
        for name, count in found.items()
        if name.endswith(" passes")
    ]
    kept = Counter(
        _reason(one.overlap.obstacle)
        for one in launches
        if one.overlap.transfers and one.overlap.obstacle
    )
    return [
        f"of {len(launches)} launches {found['with transfers of TP, EP or CP']} have transfers of "
        f"TP, EP or CP; --commfuse-fb-overlap hides them in "
        f"{found['--commfuse-fb-overlap passes as typed']} as typed, in "
        f"{found['and without the flags of another overlap']} without the flags of another overlap"
        + (f"; not: {', '.join(f'{n} x {why}' for why, n in kept.most_common())}" if kept else ""),
        "TP above 1 and neither LoRA nor another overlap: "
        f"{found['TP above 1, neither LoRA nor another overlap']}, in full "
        f"{found['of these full']}",
        f"of the {found['TP 1']} that are refused for TP 1 only, with --commfuse-dp alone: "
        f"{found['--commfuse-dp alone']}",
        f"--commfuse-ulysses fits {found['of these --commfuse-ulysses fits']} of "
        f"{found['Ulysses launches']} Ulysses launches, "
        f"{found['and without what excludes --use-commfuse']} without what excludes --use-commfuse",
        f"of the {found['not refused']} that are not refused {', '.join(passes)}",
        f"of these, blocks too short to be faster, left to Megatron's order by default: "
        f"{found['of these with short blocks']}",
    ]


def _reason(obstacle: str) -> str:
    """The same for launches that differ in their numbers only."""
    return re.sub(r"^\d+ micro-batches: \d+%", "too few micro-batches: less than half", obstacle)
