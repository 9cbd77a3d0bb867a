"""The pictures of `--compare`: three losses over each other, their differences, and the speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.tools.report.charts import Bar, Line, Picture, Table, bars, lines
from commfuse_npu.tools.report.page import Section, environment, write_page

from .training import Outcome

__all__ = ["compare_page", "pictures"]

_TINTS = {"plain": "grey", "commfuse": "blue", "megatron": "orange", "overlap": "green"}


def pictures(outcomes: Mapping[str, Outcome]) -> list[Picture]:
    """The overlay, the difference to the plain losses, and seconds per iteration if measured."""
    losses = [
        Line(mode, tuple(outcome.losses.items()), mode == "commfuse")
        for mode, outcome in outcomes.items()
    ]
    plain = outcomes["plain"].losses
    differences = [
        Line(mode, tuple((i, loss - plain[i]) for i, loss in outcome.losses.items() if i in plain),
             mode == "commfuse")
        for mode, outcome in outcomes.items()
        if mode != "plain"
    ]  # fmt: skip
    drawn = [
        lines("Loss over the training, nats per byte, lower is better", "iteration", losses,
              whole=True, show="{:.9g}".format),
        lines("Difference of the loss to that of plain", "iteration", differences,
              line=("plain", 0.0), whole=True, show="{:.3g}".format),
    ]  # fmt: skip
    speeds = {mode: outcome.speed for mode, outcome in outcomes.items() if outcome.speed}
    if len(speeds) == len(outcomes):
        shown = [
            Bar(mode, speed.seconds, *speed.quartiles,
                f"{mode}: {speed}", _TINTS[mode])
            for mode, speed in speeds.items()
        ]  # fmt: skip
        today = "megatron", speeds["megatron"].seconds
        drawn.append(
            bars(
                "Time of an iteration",
                "seconds, median and quartiles, lower is better",
                shown,
                today,
            )
        )
    return drawn


def compare_page(
    path: Path,
    words: Sequence[str],
    outcomes: Mapping[str, Outcome],
    identical: bool,
    said: Sequence[str],
) -> None:
    """Write the page.

    Args:
        words: the command.
        identical: whether plain and fused are the same, bit for bit.
        said: what else the comparison prints about speeds and Megatron's GEMMs.

    Raises:
        OSError: it cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    iterations = len(outcomes["plain"].losses)
    first = (
        "**Plain and fused are the same, bit for bit**: "
        f"every loss of {iterations} iterations and every weight after them."
        if identical
        else f"**Plain and fused are not the same, bit for bit**, over {iterations} iterations."
    )
    hashes = Table(
        ("training", "last loss", "sha256 of all weights"),
        tuple(
            (mode, f"{outcome.losses[outcome.iteration]:.9g}", f"`{outcome.weights_sha256}`")
            for mode, outcome in outcomes.items()
        ),
        "how the trainings ended",
    )
    drawn = pictures(outcomes)
    texts = {
        0: ("Equal lines lie on each other, and the last one is seen.",),
        1: ("0 is the same number; a difference that is not 0 has its size in the table.",),
    }
    sections = [
        Section(picture.title, texts.get(at, ()), picture, (hashes,) if at == 0 else ())
        for at, picture in enumerate(drawn)
    ]
    write_page(path, "Three trainings compared", [first, *said], sections, environment(words))
