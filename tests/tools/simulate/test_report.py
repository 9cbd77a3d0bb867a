"""Verdict of a sweep: which variants are compared, and the wording."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.simulate.report import Standing, cells
from commfuse_npu.tools.simulate.sweep import Outcome, Point, Range
from commfuse_npu.tools.simulate.variants import variants

KNOWN = {variant.name: variant for variant in variants(8, 8, 7)}
STEPS = {
    "plain-mesh": 20.0, "megatron": 18.0, "coc-4": 17.0,
    "commfuse-c4-l7": 16.2, "commfuse-c4-l7-wgrad": 14.4,
}  # fmt: skip
ALIKE = {name: step for name, step in STEPS.items() if not name.endswith("-wgrad")}


def point(steps: dict[str, float], sequence: int = 4096, npus: int = 8) -> Point:
    def made(name: str, step: float) -> Outcome:
        unit, layer = Range(1.0, 1.0, 1.0), Range(step / 1e3, step / 1e3, step / 1e3)
        return Outcome(KNOWN[name], Range(step, step, step), unit, layer, unit, unit, 0)

    outcomes = {name: made(name, step) for name, step in steps.items()}
    return Point(sequence, npus, 1, Range(1.0, 1.0, 1.0), outcomes)


def test_rows_are_of_the_fastest_of_each_role() -> None:
    assert KNOWN["coc-8"].role == "rival"
    # Points are summed relative to plain: one slow point does not decide.
    points = [point(STEPS), point({**STEPS, "coc-4": 17.9}, 8192)]
    standing = Standing(points)
    assert standing.best("today", "rival").name == "coc-4"
    compared = ["plain-mesh", "megatron", "commfuse-c4-l7", "commfuse-c4-l7-wgrad"]
    assert list(standing.compared) == compared
    names = [variant.name for variant in standing.selected(False)]
    assert names == [*compared[:2], "coc-4", *compared[2:]]
    assert {variant.name for variant in standing.selected(True)} == set(STEPS)
    heads = [row[0] for row in cells(points[0], standing.selected(False))]
    assert heads[-1] == "**commfuse-c4-l7-wgrad**"


@pytest.mark.parametrize(
    ("points", "first", "second"),
    [
        ([point(STEPS)],
         "Best of ours: **commfuse-c4-l7-wgrad**, a step in 14.40 s, a layer in 14.4 ms: "
         "`--of commfuse-c4-l7-wgrad`; weight gradients are summed block by block "
         "(other rounding). With Megatron's bits: **commfuse-c4-l7**, a step in 16.20 s, a "
         "layer in 16.2 ms: `--of commfuse-c4-l7`",
         "20.0 % shorter (10.0 % shorter with Megatron's bits) than Megatron's order, 18.00 s; "
         "15.3 % shorter (4.7 % shorter with Megatron's bits) than coc-4, the best alternative "
         "that exists, 17.00 s."),
        ([point({**ALIKE, "commfuse-c4-l7": 18.9}), point(ALIKE, 8192)],
         "Best of ours: **commfuse-c4-l7**, a step in 16.20 s to 18.90 s: `--of commfuse-c4-l7`",
         "From 5.0 % longer to 10.0 % shorter than Megatron's order, 18.00 s to 18.00 s; "
         "from 11.2 % longer to 4.7 % shorter than coc-4, the best alternative that exists, "
         "17.00 s to 17.00 s."),
        ([point({"plain-mesh": 20.0, "coc-4": 14.0})],
         "Nothing of ours was simulated: --variants 'commfuse-*' would. Shortest step: "
         "coc-4, 14.00 s.",
         "Nothing to compare."),
    ],
)  # fmt: skip
def test_two_lines_say_which_is_best_and_how_it_compares(points, first: str, second: str) -> None:
    assert Standing(points).verdict(lambda variant: f"--of {variant.name}") == [first, second]
