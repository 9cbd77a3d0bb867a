"""Who is who among what was measured, and how the best of ours compares, over all settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from commfuse_npu.tools.bench.results import Result, Setting, fastest
from commfuse_npu.tools.bench.variants import REFERENCE, Variant, is_ours, of_group

__all__ = ["of_settings", "shown", "verdict"]

_ORDERS = {
    "megatron": "Megatron's order",
    "megatron-p2p": "Megatron's order over direct exchanges",
    "collective": "torch's collectives",
}
"""What a user has today, the first of them that was measured."""


def of_settings(results: Sequence[Result]) -> dict[Setting, list[Result]]:
    """The results of each setting, in the order in which they were measured."""
    return {setting: list(rows) for setting, rows in groupby(results, key=lambda row: row.setting)}


def shown(results: Sequence[Result]) -> list[str]:
    """The five variants that a reader needs first, of one group of settings.

    The reference, what a user has today, the fastest other, the fastest of ours and ``auto``; the
    fastest over all of these settings.
    """
    names = list(dict.fromkeys(row.variant for row in results))
    today = _today(names)
    ours = _best(results, lambda name: is_ours(name) and name != "auto")
    other = _best(results, lambda n: not is_ours(n) and n not in (REFERENCE, today))
    kept = {REFERENCE, today, other, ours, "auto"}
    return [name for name in names if name in kept]


def verdict(results: Sequence[Result]) -> list[str]:
    """Two lines: the best of ours and its options, and how it compares; one if there is none."""
    ours = _best(results, lambda name: is_ours(name) and "-wgrad" not in name) or _best(
        results, is_ours
    )
    if ours is None:
        return ["Nothing of ours was measured: --variants 'ours-*,auto' would."]
    pairs: dict[str, list[float]] = {"today": [], "rival": []}
    orders: set[str] = set()
    for rows in of_settings(results).values():
        mine = _of(rows, ours)
        today = _of(rows, _today([row.variant for row in rows]))
        others = [row for row in rows if not is_ours(row.variant)]
        if mine is None:
            continue
        if today is not None:
            pairs["today"].append(mine.median_ms / today.median_ms - 1)
            orders.add(_ORDERS[today.variant])
        pairs["rival"].append(mine.median_ms / fastest(others).median_ms - 1)
    said = []
    if pairs["today"]:
        said.append(f"{_change(pairs['today'])} {' or '.join(sorted(orders))}")
    said.append(f"{_change(pairs['rival'])} the fastest other that was measured")
    schedule = next(
        (one for ranks in _sizes(results) for one in of_group(ranks) if one.name == ours), None
    )
    turns = schedule is not None and schedule.kind == "turns"
    flags = [] if turns else ["--use-commfuse"]
    options = " ".join([*flags, *(_options(schedule) if schedule else ())])
    compared = "; ".join(said)
    return [
        f"Best of ours over {_settings(len(pairs['rival']))}: **{ours}**: `{options}`",
        f"{compared[0].upper()}{compared[1:]}. The bound of each setting, max(compute, wire), is "
        "for nobody to launch.",
    ]


def _settings(number: int) -> str:
    return "one setting" if number == 1 else f"{number} settings"


def _change(shares: Sequence[float]) -> str:
    """The median, the extremes, and in how many settings we are ahead."""
    if len(shares) == 1:
        return f"{_said(shares[0])} than"
    ordered = sorted(shares)
    middle, ahead = ordered[len(ordered) // 2], sum(share < 0 for share in shares)
    return (
        f"in {ahead} of {len(shares)} settings ahead, {_said(middle)} in the middle one "
        f"({_said(ordered[0])} to {_said(ordered[-1])}) than"
    )


def _said(share: float) -> str:
    return f"{100 * abs(share):.1f} % {'longer' if share > 0 else 'shorter'}"


def _options(variant: Variant) -> Iterator[str]:
    if variant.kind == "turns":
        yield "--commfuse-fb-overlap"
    elif variant.tuned:
        yield "--commfuse-tuning on"
    elif variant.schedule is not None:
        yield f"--commfuse-lanes {variant.schedule.lanes} --commfuse-chunks"
        yield str(variant.schedule.chunks)
        if variant.schedule.taper != 1:
            yield f"--commfuse-taper {variant.schedule.taper:g}"
    if variant.wgrad != "whole":
        yield f"--commfuse-wgrad {variant.wgrad}"


def _sizes(results: Sequence[Result]) -> list[int]:
    return list(dict.fromkeys(row.setting.ranks for row in results))


def _today(names: Sequence[str]) -> str | None:
    return next((name for name in _ORDERS if name in names), None)


def _of(rows: Sequence[Result], name: str | None) -> Result | None:
    return next((row for row in rows if row.variant == name), None)


def _best(results: Sequence[Result], wanted: Callable[[str], bool]) -> str | None:
    """By the mean of the logarithms of the speed-ups, of those that are in the most settings."""
    found: dict[str, list[float]] = {}
    for row in results:
        if wanted(row.variant):
            found.setdefault(row.variant, []).append(math.log(row.speedup))
    most = max(map(len, found.values()), default=0)
    full = {name: sum(logs) for name, logs in found.items() if len(logs) == most}
    return max(full, key=full.__getitem__, default=None)
