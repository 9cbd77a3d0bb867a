"""The table of a layer in every form."""

from __future__ import annotations

from scripts.evidence.layers import BOUNDS, OURS, RIVALS, point


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
