"""How long what begins late may take."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.measure import deadline
from commfuse_npu.tools.measure.deadline import Deadline


def test_what_begins_late_is_ended_a_tenth_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    until = Deadline(50)
    assert not until.over
    assert until.limit(600) == 600
    now[0] += 49 * 60
    assert not until.over
    assert until.limit(600) == pytest.approx(360)
    now[0] += 2 * 60
    assert until.over
    now[0] += 5 * 60
    assert until.limit(600) == 1
