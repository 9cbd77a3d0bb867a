"""The table of a layer in every form."""

from __future__ import annotations

from itertools import product

import pytest

from scripts.evidence import layers
from scripts.evidence.layers import BOUNDS, OURS, RIVALS, Point, point, report, section, steps

FORMS = {
    "ours": 0.8, "ours, other rounding": 0.7, "default": 0.9, "forward-backward": 0.77,
    "CoC": 0.85, "MC2": 0.78, "Megatron": 0.95,
    "CoC tuned": 0.83, "ideal": 0.75, "compute": 0.5,
}  # fmt: skip


def given(*corners: dict[str, float], ordered: dict[str, float] | None = None) -> Point:
    shares = tuple({**FORMS, **corner} for corner in corners)
    return Point("a machine", "a model", 8, 8192, shares, {**shares[0], **(ordered or {})})


def test_a_form_is_ahead_of_those_that_exist() -> None:
    kernel = {"ours, other rounding": 0.86, "CoC fused": 0.75}
    text = report([given({}, {"ours": 0.9}, ordered={"MC2": 0.82}), given(kernel, {})])
    # Typical figures; every end of the ranges; sums in an order. A kernel is there once.
    assert "| CoC fused (of 1) |" in text
    assert "| *ours* | 2; 1; 2 | 0; 0; 0 | 0; 0; 1 | 2; 2; 2 | 0; 0; 1 |" in text
    assert "| *ours, other rounding* | 1; 1; 1 | 0; 0; 0 | 1; 1; 1 | 2; 2; 2 | 1; 1; 1 |" in text
    # The shortest that can be launched is bold, and its range is there.
    assert "| 0.800 (0.80 .. 0.90) | **0.700** (0.70 .. 0.70) |" in text


def test_steps_are_counted_with_unpaired_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "CORNERS", layers.CORNERS[:1])
    found = steps("ascend_910b_server", "llama3_8b", 2, 1024)
    assert found.keys() == {*product((15, 55, 118), ("none", "full"), (8, 32))}
    eight, more = (found[15, "none", count][0] for count in (8, 32))
    # One of eight runs alone, in Megatron's order.
    paired = (8 * eight["forward-backward"] - eight["Megatron"]) / 7
    assert more["forward-backward"] == pytest.approx((31 * paired + more["Megatron"]) / 32)
    assert found[15, "full", 8][0]["Megatron"] > eight["Megatron"]
    assert found[118, "none", 8][0]["Megatron"] > eight["Megatron"]


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


def test_comments_that_do_not_pair_are_refused() -> None:
    begin, end = "<!-- begin: a -->", "<!-- end: a -->"
    page = section(f"by hand\n{begin}\nold\n{end}\nmore", "a", "text")
    assert (page.split("\n")[:2], "old" in page, page[-5:]) == (["by hand", begin], False, "\nmore")
    for marks in ([], [begin], [end, begin], [begin, begin, end], [begin, end, end]):
        with pytest.raises(ValueError, match="once each, in this order; add them where"):
            section("\n".join(marks), "a", "text")
