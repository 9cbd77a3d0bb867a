"""The result of ``measure``: a verdict, and ``measured.md`` with the tables behind it.

A form of a launch is recommended if the quartiles of its iterations do not overlap with those of
any other, and its losses match those of Megatron's order, as far as ten iterations show.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commfuse_npu.tools.hardware.description import Figure, Hardware
from commfuse_npu.tools.measure.measured_launches import WARM_UP, MeasuredTraining
from commfuse_npu.tools.simulate.variants import MEGATRON, REFERENCE
from commfuse_npu.tools.terminal import table_head, table_row

Row = tuple[str, str, str, str]
"""Name of a figure, its measured range, the described range, and how they compare."""

_ALIKE = 0.01
"""Largest relative difference of losses in ten iterations between orders of the same sums."""


def verdict(trainings: Sequence[MeasuredTraining]) -> Iterator[str]:
    """The verdict on a launch: flags, times, equal weights, and failures, as Markdown."""
    ran = [training for training in trainings if not training.failed]
    if ran:
        today = _today(ran)
        sound = [training for training in ran if _loss_off(today, training) <= _ALIKE]
        yield from _fastest(sound)
        if bad := [training for training in ran if training not in sound]:
            title = today.form.name
            yield f"**Do not use**: {_titles(bad)}: losses are not those of {title}, or not finite."
    for weights in dict.fromkeys(training.weights for training in ran if training.weights):
        same = [training for training in ran if training.weights == weights]
        if len(same) > 1:
            yield f"**The same weights, bit for bit**: {_titles(same)}."
    alike = {training.weights for training in ran if training.form in (REFERENCE, MEGATRON)}
    if len(alike - {None}) > 1:
        yield (
            "Blocking collectives and Megatron's order are the same arithmetic, and their bits "
            "differ: sums of this launch change from run to run. With HCCL_DETERMINISTIC=true "
            "(MindSpeed's `--npu-deterministic`) bits can be compared."
        )
    for training in trainings:
        if training.failed:
            why, *lines = training.failed.splitlines()
            cause = f"; `{lines[-1].strip()}`" if lines else ""
            yield f"**Could not run**: {training.form.name}: {why}{cause}"


def _fastest(sound: Sequence[MeasuredTraining]) -> Iterator[str]:
    # Blocking collectives are only a baseline: nobody launches them.
    candidates = [training for training in sound if training.form is not REFERENCE] or list(sound)
    if not candidates:
        return
    best, *others = sorted(candidates, key=lambda training: training.steady[1])
    rival = next((training for training in others if training.form.ours != best.form.ours), None)
    close = [training for training in others if training.steady[0] <= best.steady[2]]
    flags = f"`{best.form.flags}`" if best.form.flags else "none of these flags"
    lead = f"**Use {flags}**" if others and not close else f"**Not decided**; fastest is {flags}"
    against = [f"{best.steady[1]:,.0f} ms per iteration"]
    for training in sound:
        usual = training.form in (REFERENCE, MEGATRON)
        if training is not best and (usual or training is rival):
            less = 1 - best.steady[1] / training.steady[1]
            against.append(f"{100 * less:.1f} % less time than {training.form.name}")
    yield f"{lead}: {', '.join(against)}."
    if close:
        yield f"Quartiles overlap with those of: {_titles(close)}."


def launch_table(trainings: Sequence[MeasuredTraining]) -> Iterator[str]:
    """A Markdown row per form that ran: times, losses compared with Megatron's, memory, weights."""
    ran = [training for training in trainings if not training.failed]
    if not ran:
        return
    today = _today(ran)
    yield f"Medians and quartiles of the iterations after {WARM_UP}.\n"
    head = ["form", "flags", "ms", "quartiles", f"less time than {today.form.name}", "losses off"]
    yield table_head([*head, "most memory", "weights"], numbers=False)
    for training in ran:
        low, middle, high = training.steady
        flags = training.form.flags
        yield table_row([
            training.form.name,
            f"`{flags}`" if flags else "",
            f"{middle:,.1f}",
            f"{low:,.1f} .. {high:,.1f}",
            "reference" if training is today else f"{100 * (1 - middle / today.steady[1]):.1f} %",
            f"{_loss_off(today, training):.1e}",
            f"{training.peak / 1024:.2f} GiB" if training.peak else "",
            f"`{training.weights[:8]}`" if training.weights else "",
        ])  # fmt: skip


def compared(measured: Hardware, described: Hardware) -> list[Row]:
    """A row for each measured figure."""

    def place(value: float, figure: Figure) -> str:
        if figure.low <= value <= figure.high:
            return "in the range"
        return "**below**" if value < figure.low else "**above**"

    pairs = ((name, figure, described.figures[name]) for name, figure in measured.figures.items())
    return [
        (name, _range(figure), _range(other), place(figure.typical, other))
        for name, figure, other in pairs
        if figure != other
    ]


def as_markdown(
    verdict: Sequence[str],
    trainings: Sequence[MeasuredTraining],
    figures: Sequence[Row],
    failed: Mapping[str, str],
    facts: Mapping[str, Any],
) -> str:
    """The text of ``measured.md``; ``failed``: reasons, by step."""
    lines = ["# Measured", "", *(f"{line}\n" for line in verdict)]
    if trainings:
        lines += ["## The launch", "", *launch_table(trainings), ""]
    if figures:
        lines += ["## Figures, in SI units", ""]
        head = "figure", "measured (quartiles)", "described", "lies"
        lines += [table_head(head, numbers=False), *map(table_row, figures), ""]
    launches = {f"launch, {each.form.name}": each.failed for each in trainings if each.failed}
    for name, why in {**failed, **launches}.items():
        lines += [f"## {name}: failed", "", "```", why.strip(), "```", ""]
    lines += ["## Machine", "", *(f"- {k}: {v}" for k, v in facts.items() if v not in ([], None))]
    return "\n".join(lines) + "\n"


def _range(figure: Figure) -> str:
    return f"{figure.typical:.4g} ({figure.low:.4g} to {figure.high:.4g})"


def _today(ran: Sequence[MeasuredTraining]) -> MeasuredTraining:
    return next((training for training in ran if training.form is MEGATRON), ran[0])


def _titles(trainings: Sequence[MeasuredTraining]) -> str:
    return "; ".join(training.form.name for training in trainings)


def _loss_off(training: MeasuredTraining, other: MeasuredTraining) -> float:
    """Largest relative difference of losses; infinite if one is not finite."""
    pairs = list(zip(training.losses, other.losses, strict=False))
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return math.inf
    return max(abs(a - b) / abs(a) if a else abs(b) for a, b in pairs)
