"""Random cases, the same in every run (more with ``--random-cases``), and former failures."""

import pytest

from commfuse_npu.plan import Schedule
from tests.random_networks.campaign import campaign
from tests.random_networks.case import WITH_PROJECTION, Case, Layer, Network
from tests.random_networks.compare import complaints

MORE = [pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((2, 180), (3, 50))]
ONE_LANE = Schedule(lanes=1)
TO_LINEAR = Layer("all_to_all_linear", schedule=ONE_LANE)
ATTENTION = Layer(WITH_PROJECTION, 64, 32, schedule=ONE_LANE, queries=2, keys=1)
FOUND: dict[str, Case] = {
    "no rows": Network(2, (TO_LINEAR,), rows=0, lanes=1),
    "the backward of an empty batch behind attention": Network(
        2, (ATTENTION,), rows=1, batch=0, lanes=1
    ),
}


@pytest.mark.parametrize(("size", "cases"), [(1, 40), (2, 70), (3, 40), (4, 20), *MORE])
def test_fused_is_plain(request, ranks, size: int, cases: int) -> None:
    campaign(request, ranks(size), cases, complaints)


@pytest.mark.parametrize("fault", FOUND)
def test_it_does_not_fail_any_more(ranks, fault: str) -> None:
    differences = ranks(FOUND[fault].size).run(complaints, FOUND[fault])
    assert not any(differences), differences
