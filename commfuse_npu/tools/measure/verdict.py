"""What ten iterations of each form say: which is fastest, which flags to use, which bits are kept.

Times are medians of the iterations after the first :data:`WARM_UP`.  A form is to be used if its
quartiles are apart from those of all others and its losses are those of Megatron's order, as far as
ten iterations tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from commfuse_npu.tools.measure.figures import Range, quartiles
from commfuse_npu.tools.measure.trainings import Training
from commfuse_npu.tools.report.charts import Bar, Picture, Table, bars

__all__ = ["WARM_UP", "iterations", "picture", "table", "verdict"]

WARM_UP = 3
"""Iterations that do not count: buffers, connections and compiled kernels come with them."""

_ALIKE = 0.01
"""As far as losses of another order of the same sums may be off in ten iterations (relative)."""

_TINTS = {"megatron": "orange", "plain": "grey"}
"""What others are compared with, of one arithmetic, and how it is drawn."""


def verdict(trainings: Sequence[Training], device: str) -> list[str]:
    """Sentences for people: times, flags, bits, and what could not be run.

    Args:
        trainings: of one launch.
        device: on which it ran.
    """
    ran = [one for one in trainings if one.log is not None]
    lines = []
    if ran:
        today = next((one for one in ran if one.form.name == "megatron"), ran[0])
        sound = [one for one in ran if _furthest(today, one) <= _ALIKE]
        lines = [*_times(sound, device), *_unsound(ran, sound, today), *_bits(ran, today, device)]
    for one in trainings:
        if one.log is None:
            lines.append(f"**Could not run**: {one.form.title}: {_last(one)}")
    return lines


def _unsound(ran: Sequence[Training], sound: Sequence[Training], today: Training) -> Iterator[str]:
    if others := [one for one in ran if one not in sound]:
        said = f"those of {today.form.title}" if sound else "finite, nor is there one to compare"
        yield f"**Not to be used**: {_titles(others)}: losses are not {said}."


def _times(ran: Sequence[Training], device: str) -> Iterator[str]:
    if not ran:
        return
    # Plain collectives are there to compare with: nobody launches them.
    asked = [one for one in ran if one.form.name != "plain"] or list(ran)
    best = min(asked, key=_median)
    ours = [one for one in asked if one.form.ours]
    others = [one for one in asked if one.form.ours != best.form.ours]
    compared = [one for one in ran if one is not best and one.form.name in _TINTS]
    rival = min(others, key=_median, default=best)
    if rival is not best and rival not in compared:
        compared.append(rival)
    close = [one for one in asked if one is not best and not _apart(best, one)]
    flags = f"`{best.form.flags}`" if best.form.flags else "none of these flags"
    lead = f"Fastest to launch here: **{best.form.title}**"
    if device != "cpu":
        told = compared and not close
        lead = f"**Use {flags}**" if told else f"**Not decided**; fastest is {flags}"
    said = ", ".join(_against(best, one) for one in compared)
    yield f"{lead}: {_ms(best)} per iteration{', ' if said else ''}{said}."
    if ours and not best.form.ours:
        mine = min(ours, key=_median)
        yield f"Best of ours: {mine.form.title}, {_ms(mine)}: {_against(mine, best)}."
    if close:
        yield (
            f"Quartiles of {len(_counted(best))} iterations do not tell {best.form.title} apart "
            f"from: {_titles(close)}."
        )
    if device == "cpu":
        yield "On CPU and loopback that says nothing of NPUs: it shows that every form runs."


def _bits(ran: Sequence[Training], today: Training, device: str) -> Iterator[str]:
    """Who has the same weights as whom, and how far others' losses are off."""
    groups: dict[str | None, list[Training]] = {}
    for one in ran:
        weights = one.log.weights if one.log else None
        groups.setdefault(weights, []).append(one)
    for weights, same in groups.items():
        if weights is not None and len(same) > 1:
            after = f"after {len(_losses(today))} iterations"
            yield f"**The same weights, bit for bit**, {after}: {_titles(same)}."
    for weights, same in groups.items():
        if today in same:
            continue
        off = max(_furthest(today, one) for one in same)
        losses = (
            f"losses differ by {off:.1e} at most (relative)"
            if off
            else "the same losses as printed"
        )
        bits = "other weights" if weights is not None else "weights are not known"
        yield f"Beside {today.form.title}: {_titles(same)}: {losses}, {bits}."
    alike = {one.log.weights for one in ran if one.log and one.form.name in _TINTS} - {None}
    if device != "cpu" and len(alike) > 1:
        yield (
            "Plain collectives and Megatron's order are the same arithmetic, and their bits "
            "differ: sums of this launch change from run to run. With HCCL_DETERMINISTIC=true "
            "(MindSpeed's `--npu-deterministic`) bits can be compared."
        )


def _losses(one: Training) -> list[float]:
    assert one.log is not None
    return one.log.losses


def _titles(trainings: Sequence[Training]) -> str:
    return "; ".join(one.form.title for one in trainings)


def _furthest(one: Training, other: Training) -> float:
    """How far losses are off at most (relative)."""
    return max(map(_off, _losses(one), _losses(other)))


def _off(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / abs(one) if one else abs(other)


def _last(one: Training) -> str:
    why, *said = one.failed.splitlines()
    return f"{why}; `{said[-1].strip()}`" if said else why


def _against(one: Training, other: Training) -> str:
    share = _median(one) / _median(other) - 1
    word = "shorter" if share < 0 else "longer"
    return f"{100 * abs(share):.1f} % {word} than {other.form.title}"


def _median(one: Training) -> float:
    return _seconds(one)[1]


def _apart(one: Training, other: Training) -> bool:
    low, _, high = _seconds(one)
    other_low, _, other_high = _seconds(other)
    return high < other_low or other_high < low


def _counted(one: Training) -> list[float]:
    assert one.log is not None
    return one.log.milliseconds[WARM_UP:]


def _seconds(one: Training) -> Range:
    low, middle, high = quartiles(_counted(one))
    return low / 1e3, middle / 1e3, high / 1e3


def _ms(one: Training) -> str:
    return f"{1e3 * _median(one):,.0f} ms"


def picture(ran: Sequence[Training]) -> Picture:
    """The time of an iteration in each form, with Megatron's order as a line."""
    shown = []
    for one in ran:
        low, middle, high = _seconds(one)
        tint = "blue" if one.form.ours else _TINTS.get(one.form.name, "grey")
        shown.append(Bar(one.form.title, middle, low, high, f"{one.form.title}: {_ms(one)}", tint))
    today = next((one for one in ran if one.form.name == "megatron"), None)
    line = None if today is None else (today.form.title, _median(today))
    axis = "seconds, median and quartiles, lower is better"
    return bars("Time of an iteration", axis, shown, line)


def table(ran: Sequence[Training]) -> Table:
    """A row per form: flags, times, throughput, memory, and how the training ended."""
    compared = [one for one in ran if one.form.name in _TINTS]
    head = (
        *("form", "flags", "ms per iteration", "quartiles"),
        *(f"against {one.form.title}" for one in compared),
        *("TFLOP/s per device", "most memory", "last loss", "last grad norm", "weights"),
    )
    rows = []
    for one in ran:
        assert one.log is not None
        low, middle, high = (1e3 * value for value in _seconds(one))
        rows.append(
            (
                one.form.title,
                f"`{one.form.flags}`" if one.form.flags else "",
                f"{middle:,.1f}",
                f"{low:,.1f} .. {high:,.1f}",
                *(
                    "" if one is other else f"{100 * (_median(one) / _median(other) - 1):+.1f} %"
                    for other in compared
                ),
                f"{quartiles(one.log.teraflops[WARM_UP:])[1]:.3g}" if one.log.teraflops else "",
                f"{one.log.peak / 1024:.2f} GiB" if one.log.peak else "",
                f"{one.log.losses[-1]:.7g}",
                f"{one.log.grad_norms[-1]:.3f}" if one.log.grad_norms else "",
                f"`{one.log.weights[:8]}`" if one.log.weights else "",
            )
        )
    filled = [at for at in range(len(head)) if any(row[at] for row in rows)]
    caption = f"Medians of the iterations after {WARM_UP}; weights: the first digits of a SHA-256"
    return Table(
        tuple(head[at] for at in filled),
        tuple(tuple(row[at] for at in filled) for row in rows),
        caption,
    )


def iterations(ran: Sequence[Training]) -> tuple[Table, ...]:
    """Losses, gradient norms and times of every iteration, a column per form."""
    tables = []
    for name, attribute, show in (
        ("loss", "losses", "{:.6e}"),
        ("gradient norm", "grad_norms", "{:.3f}"),
        ("ms", "milliseconds", "{:.1f}"),
    ):
        columns = [getattr(one.log, attribute) for one in ran]
        rows = tuple(
            (str(number), *map(show.format, values))
            for number, values in enumerate(zip(*columns, strict=False), 1)
        )
        head = "iteration", *(one.form.title for one in ran)
        tables.append(Table(head, rows, f"{name} of each iteration", folded=True))
    return tuple(tables)
