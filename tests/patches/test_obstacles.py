"""A reason is the text that it is; its way out goes with it to other ranks."""

from __future__ import annotations

import pickle
from collections import Counter

from mindspeed_patches.obstacles import Obstacle, told


def test_a_reason_is_counted_as_its_text() -> None:
    counts = Counter([Obstacle("why", "do it"), "why", Obstacle("why")])
    assert counts == {"why": 3}


def test_the_way_out_is_told_and_survives_a_pickle() -> None:
    reason = pickle.loads(pickle.dumps(Obstacle("why", "do it")))
    assert (reason, told(reason)) == ("why", "why (do it)")
    assert told(Obstacle("why")) == told("why") == "why"
