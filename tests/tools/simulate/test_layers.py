"""The table of a layer in every form."""

from __future__ import annotations

from itertools import product

import pytest

from scripts.evidence import layers
from scripts.evidence.layers import BOUNDS, OURS, RIVALS, point, steps


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
