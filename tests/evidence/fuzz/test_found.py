"""Cases that once failed."""

from __future__ import annotations

import pytest

from commfuse_npu.plan import Schedule
from tests.evidence.fuzz.campaign import failure_of
from tests.evidence.fuzz.case import Case, Layer, Network

FOUND: dict[str, Case] = {
    "partials of tapered chunks were overwritten": Network(
        size=4,
        layers=(
            Layer(
                op="linear_reduce_scatter",
                schedule=Schedule(lanes=1, chunks=3, taper=1.5),
            ),
        ),
        rows=3,
        lanes=1,
    ),
}


@pytest.mark.parametrize("fault", FOUND)
def test_it_does_not_fail_any_more(ranks, fault: str) -> None:
    case = FOUND[fault]
    failure = failure_of(ranks(case.size), case)
    assert not failure, failure
