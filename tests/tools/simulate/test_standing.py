"""The verdict: who is compared with whom, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commfuse_npu.tools.simulate import plot, standing
from commfuse_npu.tools.simulate.sweep import Outcome, Point, Range
from commfuse_npu.tools.simulate.variants import CATCCOS, IDEAL, variants

KNOWN = {variant.name: variant for variant in variants(8, 8, 7)}
STEPS = {
    "plain-mesh": 20.0,
    "megatron": 18.0,
    "coc-4": 17.0,
    "coc-tuned": 15.0,
    "kernel-ideal": 14.0,
    "commfuse-c4-l7": 16.2,
    "commfuse-c4-l7-wgrad": 14.4,
}
ALIKE = {name: step for name, step in STEPS.items() if not name.endswith("-wgrad")}
OPTIONS = {
    "commfuse-c4-l7": ["--use-commfuse", "--commfuse-chunks", "4"],
    "commfuse-c4-l7-wgrad": ["--use-commfuse", "--commfuse-wgrad", "blocks"],
}


def _point(steps: dict[str, float], sequence: int = 4096, npus: int = 8) -> Point:
    one = Range(1.0, 1.0, 1.0)

    def made(name: str, step: float) -> Outcome:
        exposed = Range(step - 12, step - 12, step - 12)
        layer = Range(step / 1e3, step / 1e3, step / 1e3)
        return Outcome(name, Range(step, step, step), one, layer, exposed, one, one, one, 0, 0)

    return Point(sequence, npus, 1, one, tuple(made(*item) for item in steps.items()))


def test_every_variant_has_a_role() -> None:
    roles = {name: standing.role(variant) for name, variant in KNOWN.items()}
    assert roles["plain-mesh"] == roles["plain-ring"] == "plain"
    assert roles["megatron"] == "today"
    assert roles["coc-8"] == roles["coc-fused"] == roles["mc2"] == "rival"
    # Nobody can launch these.
    assert roles["coc-tuned"] == roles["kernel-ideal"] == "bound"
    assert {roles[name] for name in KNOWN if name.startswith("commfuse")} == {"ours"}


def test_ours_is_the_fastest_with_the_fastest_that_rounds_alike_beside_it() -> None:
    found = standing.of([_point(STEPS)], KNOWN)
    assert (found.ours, found.alike) == ("commfuse-c4-l7-wgrad", "commfuse-c4-l7")
    assert (found.today, found.rival) == ("megatron", "coc-4")
    assert (found.best, found.bound) == ("coc-4", "kernel-ideal")
    assert found.compared == ["plain-mesh", "megatron", "commfuse-c4-l7", "commfuse-c4-l7-wgrad"]
    five = ["plain-mesh", "megatron", "coc-4", "kernel-ideal", "commfuse-c4-l7"]
    assert found.shown(list(STEPS), False) == [*five, "commfuse-c4-l7-wgrad"]
    assert found.shown(list(STEPS), True) == list(STEPS)
    found = standing.of([_point(ALIKE)], KNOWN)
    assert found.ours == found.alike == "commfuse-c4-l7"
    assert found.shown(list(ALIKE), False) == five
    alone = {name: STEPS[name] for name in ("plain-mesh", "commfuse-c4-l7-wgrad")}
    found = standing.of([_point(alone)], KNOWN)
    assert (found.ours, found.alike) == ("commfuse-c4-l7-wgrad", None)
    assert found.other_rounding == "weight gradients are summed block by block"


def test_two_lines_name_the_best_and_the_best_with_megatrons_bits() -> None:
    points = [_point(STEPS)]
    first, second = standing.verdict(points, standing.of(points, KNOWN), OPTIONS)
    assert first == (
        "Best of ours: **commfuse-c4-l7-wgrad**, a step in 14.40 s, a layer in 14.4 ms: "
        "`--use-commfuse --commfuse-wgrad blocks`; weight gradients are summed block by block "
        "(other rounding). With Megatron's bits: **commfuse-c4-l7**, a step in 16.20 s, a layer in "
        "16.2 ms: `--use-commfuse --commfuse-chunks 4`"
    )
    assert second == (
        "20.0 % shorter (10.0 % shorter with Megatron's bits) than Megatron's order, 18.00 s; "
        "15.3 % shorter (4.7 % shorter with Megatron's bits) than coc-4, the best rival that "
        "exists, 17.00 s. Ideal bound operator by operator, which nobody can launch: "
        "kernel-ideal, 14.00 s."
    )


def test_two_lines_with_the_bound_apart() -> None:
    points = [_point(ALIKE)]
    first, second = standing.verdict(points, standing.of(points, KNOWN), OPTIONS)
    assert first == (
        "Best of ours: **commfuse-c4-l7**, a step in 16.20 s, a layer in 16.2 ms: "
        "`--use-commfuse --commfuse-chunks 4`"
    )
    assert second == (
        "10.0 % shorter than Megatron's order, 18.00 s; 4.7 % shorter than coc-4, the best rival "
        "that exists, 17.00 s. Ideal bound operator by operator, which nobody can launch: "
        "kernel-ideal, 14.00 s."
    )


def test_where_ours_is_behind_it_says_so() -> None:
    points = [_point({**ALIKE, "commfuse-c4-l7": 18.9}), _point(ALIKE, 8192)]
    _, second = standing.verdict(points, standing.of(points, KNOWN), OPTIONS)
    assert second.startswith(
        "From 5.0 % longer to 10.0 % shorter than Megatron's order, 18.00 s to"
    )


def test_megatrons_order_may_be_the_best_rival() -> None:
    steps = {name: STEPS[name] for name in ("plain-mesh", "megatron", "commfuse-c4-l7")}
    points = [_point(steps)]
    _, second = standing.verdict(points, standing.of(points, KNOWN), OPTIONS)
    assert second == (
        "10.0 % shorter than Megatron's order, which is the best rival that exists, 18.00 s."
    )


@pytest.mark.parametrize("names", [("plain-mesh",), ("plain-mesh", "kernel-ideal")])
def test_without_ours_there_is_nothing_to_say(names: tuple[str, ...]) -> None:
    points = [_point({name: STEPS[name] for name in names})]
    first, _ = standing.verdict(points, standing.of(points, KNOWN), {})
    assert first.startswith("Nothing of ours was simulated: --variants 'commfuse-*' would.")


def test_a_bound_is_what_cannot_be_launched_whatever_it_is_called() -> None:
    assert standing.role(replace(KNOWN["coc-2"], tuned=(2, 4))) == "bound"
    assert standing.role(IDEAL) == standing.role(CATCCOS) == "bound"


def test_what_varies_is_on_the_axis() -> None:
    def axis(*points: Point) -> tuple[str, list[str]]:
        found = standing.of(points, KNOWN)
        table = plot.pictures(points, found, found.shown(list(STEPS), False))[0].tables[0]
        return table.head[0], [row[0] for row in table.rows]

    lengths = axis(_point(STEPS), _point(STEPS, 8192))
    assert lengths == ("tokens of a sequence", ["4k", "8k"])
    assert axis(_point(STEPS), _point(STEPS, npus=16)) == ("NPUs", ["8", "16"])
    both = axis(_point(STEPS), _point(STEPS, 1000, 16))
    assert both == ("NPUs, tokens of a sequence", ["8, 4k", "16, 1000"])
    # Of one point there are bars, a row for each variant.
    assert axis(_point(STEPS))[0] == "variant"


def test_parts_add_up_to_the_step() -> None:
    points = [_point({**STEPS, "plain-ring": 50.0})]
    found = standing.of(points, KNOWN)
    names = ["plain-ring", *found.shown(list(STEPS), False)]
    bars, parts = plot.pictures(points, found, names)
    for name, *values in parts.tables[0].rows:
        assert sum(map(float, values)) == pytest.approx(STEPS[name])
    assert parts.tables[0].rows[0] == ("plain-mesh", "12", "0", "8")
    assert parts.tables[0].rows[1] == ("megatron", "10", "2", "6")
    # Far off the rest: named, and not drawn.
    assert bars.note == "Not drawn: plain-ring 2.8 times the line."
    assert "plain-ring" not in [row[0] for row in bars.tables[0].rows]
