"""The table of a layer in every form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from scripts.evidence import layers
from scripts.evidence.layers import (
    BOUNDS,
    OURS,
    RIVALS,
    Point,
    main,
    point,
    report,
    section,
    steps,
    steps_report,
)

FORMS = {
    "ours": 0.8, "ours, other rounding": 0.7, "default": 0.9, "forward-backward": 0.77,
    "CoC": 0.85, "MC2": 0.78, "Megatron": 0.95,
}  # fmt: skip
KERNEL = {"CoC fused": 0.75}
LIMITS = {"CoC tuned": 0.83, "ideal": 0.75, "compute": 0.5}


def given(*corners: dict[str, float], ordered: dict[str, float] | None = None) -> Point:
    shares = tuple({**FORMS, **LIMITS, **corner} for corner in corners)
    return Point("a machine", "a model", 8, 8192, shares, {**shares[0], **(ordered or {})})


def test_a_form_is_ahead_of_those_that_exist() -> None:
    text = report(
        [
            given({}, {"ours": 0.9}, ordered={"MC2": 0.82}),
            given({"ours, other rounding": 0.86}, {}),
        ]
    )
    # Typical figures; every end of the ranges; sums in an order.
    assert "| *ours* | 2; 1; 2 | 0; 0; 0 | 0; 0; 1 | 2; 2; 2 | 0; 0; 1 |" in text
    assert "| *ours, other rounding* | 1; 1; 1 | 0; 0; 0 | 1; 1; 1 | 2; 2; 2 | 1; 1; 1 |" in text
    assert "| *default* | 0; 0; 0 |" in text
    # The shortest that can be launched is bold, and its range is there.
    assert "| 0.800 (0.80 .. 0.90) | **0.700** (0.70 .. 0.70) |" in text


def test_a_kernel_of_others_is_counted_where_it_is() -> None:
    text = report([given(KERNEL), given({})])
    assert "| CoC fused (of 1) |" in text
    assert "| *ours, other rounding* | 2; 2; 2 | 1; 1; 1 |" in text
    assert "| 0.900 | 0.770 | 0.850 | 0.750 | 0.780 | 0.950 |" in text
    assert "| 0.900 | 0.770 | 0.850 | - | 0.780 | 0.950 |" in text


def test_steps_are_counted_with_unpaired_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "CORNERS", layers.CORNERS[:1])
    found = steps("ascend_910b_server", "llama3_8b", 2, 1024)
    assert found.keys() == {*product((15, 55, 118), ("none", "full"), (8, 32))}
    eight, more = (found[15, "none", count][0] for count in (8, 32))
    assert {of: eight[of] for of in RIVALS if of in eight} == {
        of: more[of] for of in RIVALS if of in more
    }
    # One of eight runs alone, in Megatron's order.
    paired = (8 * eight["forward-backward"] - eight["Megatron"]) / 7
    assert more["forward-backward"] == pytest.approx((31 * paired + more["Megatron"]) / 32)
    assert found[15, "full", 8][0]["Megatron"] > eight["Megatron"]
    assert found[118, "none", 8][0]["Megatron"] > eight["Megatron"]


def test_steps_ahead_are_counted_at_every_corner() -> None:
    key = 15, "none", 8
    corner = {"forward-backward": 2.0, **dict.fromkeys((*RIVALS, "default"), 3.0)}
    ends = {key: [corner, {**corner, "CoC": 1.0}]}
    text = steps_report([ends, {key: [{**corner, "MC2": 1.0}] * 2}])
    assert "ahead, of 2 points | default | CoC | CoC fused (of 2) | MC2 | Megatron |" in text
    assert "| 15 us, 8 micro-batches | 2; 2 | 2; 1 | 2; 2 | 1; 1 | 2; 2 |" in text


def test_a_point_is_simulated() -> None:
    one = point("ascend_910b_server", "llama2_7b", 2, 4096, corners=1)
    (shares,) = one.shares
    assert shares.keys() == {*OURS, *RIVALS, *BOUNDS} - {"CoC fused", "catccos"}, "for 8 ranks"
    assert shares["compute"] < shares["ideal"] < shares["ours"] <= shares["default"] < 1
    assert shares["ideal"] < shares["MC2"] < shares["Megatron"]
    assert shares["CoC tuned"] <= shares["CoC"]
    # Programs add in an order anyhow, and plain collectives take longer for it.
    assert one.ordered["ours"] < shares["ours"]
    assert shares["compute"] < shares["forward-backward"] < shares["MC2"]


def test_the_table_goes_into_its_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layers, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(layers, "point", lambda *wanted: given({}))
    monkeypatch.setattr(layers, "steps", lambda *wanted: {(15, "none", 8): [{"Megatron": 1.0}]})
    monkeypatch.setattr(layers, "_STEP_FORMS", ())
    file = tmp_path / "page.md"
    file.write_text("# By hand\n<!-- begin: layers -->\nold\n<!-- end: layers -->\nmore\n")
    for _ in range(2):  # the same text changes nothing
        assert main(["--tp", "8", "--markdown", str(file)]) == 0
        before, _, after = file.read_text().partition("<!-- begin: layers -->\n")
        assert before == "# By hand\n"
        assert after.count("| a machine | a model | 8 | 8192 |") == 24
        assert after.endswith("|\n\n<!-- end: layers -->\nmore\n")
        assert "old" not in after


@pytest.mark.parametrize("broken", ["", "b", "e", "eb", "bbe", "bee"])
def test_comments_that_do_not_pair_are_refused(broken: str) -> None:
    marks = {"b": "<!-- begin: a -->", "e": "<!-- end: a -->"}
    with pytest.raises(ValueError, match="once each, in this order; add them where"):
        section("\n".join(marks[one] for one in broken), "a", "text")
