"""`--compare`: the same training in several forms, and whether one changed a single bit.

"plain" runs collectives and GEMMs one after the other, with the row blocks of the fused layers;
"commfuse" runs the fused layers; "megatron" runs Megatron's own layers, whose GEMMs are not split.
Plain and fused must agree in every loss and every weight. Megatron's are shown for information: a
GEMM that is not split may round differently. With `--commfuse-fb-overlap`, "overlap" runs
Megatron's layers once more, forwards beside backwards, and must agree with Megatron's in every bit.

The trainings run one after the other, so whatever else the machine does may fall on one of them: a
ratio of speeds comes with the range that the quartiles give, and not at all from few iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.tools.report.charts import Bar, Line, Picture, Table, bars, lines
from commfuse_npu.tools.report.page import Section, environment, write_page

from .metrics import WARM_UP_ITERATIONS, Outcome

__all__ = ["identical", "page", "pictures", "remarks", "report"]

Outcomes = Mapping[str, Outcome]
"""By form: plain, commfuse, megatron and perhaps overlap."""

_LEAST = 10
"""Iterations behind a ratio of two speeds."""
_TINTS = {"plain": "grey", "commfuse": "blue", "megatron": "orange", "overlap": "green"}


def identical(outcomes: Outcomes) -> bool:
    """Whether fused is plain, and the overlap Megatron, in every bit of losses and weights."""
    pairs = (("plain", "commfuse"), ("megatron", "overlap"))
    return all(
        outcomes[one].weights_sha256 == outcomes[other].weights_sha256
        and outcomes[one].losses == outcomes[other].losses
        for one, other in pairs
        if other in outcomes
    )


def report(outcomes: Outcomes) -> list[str]:
    """Loss columns (nine digits tell any two float32 apart), finals, hashes and differences."""
    said = ["", f"{'iteration':>9} " + " ".join(f"{mode:>15}" for mode in outcomes)]
    for iteration in outcomes["plain"].losses:
        row = " ".join(f"{one.losses[iteration]:15.9g}" for one in outcomes.values())
        said.append(f"{iteration:9d} {row}")
    for mode, one in outcomes.items():
        said.append(f"final lm loss, {mode}: {one.losses[one.iteration]:.9g}")
        said.append(f"sha256 of all weights, {mode}: {one.weights_sha256}")
    said += [f"commfuse: {line}" for line in outcomes["commfuse"].layers]
    said += [f"tokens/s, {mode}: {one.speed}" for mode, one in outcomes.items() if one.speed]
    return said + remarks(outcomes)


def remarks(outcomes: Outcomes) -> list[str]:
    """Fused beside Megatron's GEMMs, and how the speeds compare, if enough iterations count.

    The range of a ratio: one mode at its fast quartile, the other at its slow one.
    """
    fused, megatron = outcomes["commfuse"], outcomes["megatron"]
    difference = max(abs(loss - megatron.losses[i]) for i, loss in fused.losses.items())
    same = "equal" if fused.weights_sha256 == megatron.weights_sha256 else "not equal"
    said = [f"commfuse against Megatron's unsplit GEMMs: largest loss difference {difference:.3g}, "
            f"weights {same} bit for bit"]  # fmt: skip
    counted = len(fused.losses) - WARM_UP_ITERATIONS
    if fused.speed is None or counted < _LEAST:
        enough = WARM_UP_ITERATIONS + _LEAST
        return [*said, f"no ratio of tokens/s: give --train-iters {enough} or more"]
    fast, middle, slow = fused.speed.seconds
    for mode, one in outcomes.items():
        if one.speed is not None and mode != "commfuse":
            low, other, high = one.speed.seconds
            said.append(
                f"tokens/s, commfuse / {mode}: {other / middle:.3f} ({low / slow:.3f} to "
                f"{high / fast:.3f} by the quartiles of {counted} iterations)"
            )
    if fused.speed.link != "loopback":
        said.append(
            "note: plain and Megatron's layers use torch's collectives over gloo, whose "
            "reduce-scatter sends the bytes of an all-reduce, twice those of the fused layers' "
            "direct transfers. Over such links a part of the ratio is these bytes, not hiding"
        )
    return said


def pictures(outcomes: Outcomes) -> list[Picture]:
    """The losses, their difference to plain's, and seconds per iteration if measured."""
    plain, losses, differences, times = outcomes["plain"].losses, [], [], []
    for mode, one in outcomes.items():
        points = tuple(one.losses.items())
        losses.append(Line(mode, points, mode == "commfuse"))
        off = tuple((i, loss - plain[i]) for i, loss in points)
        differences.append(Line(mode, off, mode == "commfuse"))
        if one.speed is not None:
            low, middle, high = one.speed.seconds
            times.append(Bar(mode, middle, low, high, f"{mode}: {one.speed}", _TINTS[mode]))
    drawn = [
        lines("Loss over the training, nats per byte, lower is better", "iteration", losses,
              whole=True, show="{:.9g}".format),
        lines("Difference of the loss to that of plain", "iteration", differences[1:],
              line=("plain", 0.0), whole=True, show="{:.3g}".format),
    ]  # fmt: skip
    if times:
        axis = "seconds, median and quartiles, lower is better"
        drawn.append(bars("Time of an iteration", axis, times, ("megatron", times[2].value)))
    return drawn


def page(path: Path, words: Sequence[str], outcomes: Outcomes) -> None:
    """Write the pictures and the verdict as a page; ``words``: the command.

    Raises:
        OSError: it cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    are = "are the same" if identical(outcomes) else "are not the same"
    verdict = (
        f"**Plain and fused {are}, bit for bit**, in every loss of "
        f"{len(outcomes['plain'].losses)} iterations and every weight after them."
    )
    rows = tuple(
        (mode, f"{one.losses[one.iteration]:.9g}", f"`{one.weights_sha256}`")
        for mode, one in outcomes.items()
    )
    hashes = Table(("training", "last loss", "sha256 of all weights"), rows, "how they ended")
    texts = ("Equal lines lie on each other, and the last one is seen.",
             "0 is the same number; a difference that is not 0 has its size in the table.",
             "The trainings ran one after the other.")  # fmt: skip
    sections = [
        Section(picture.title, (text,), picture)
        for picture, text in zip(pictures(outcomes), texts, strict=False)
    ]
    sections.append(Section("Weights", (), None, (hashes,)))
    said = [verdict, *remarks(outcomes)]
    write_page(path, "Trainings compared", said, sections, environment(words))
