"""Random cases on a mock device; more with ``--random-cases``."""

import pytest

from tests.distributed.programs import transport
from tests.late_transfers.device import device
from tests.random_networks.campaign import campaign
from tests.random_networks.case import Case
from tests.random_networks.compare import at_rest, differences, quiet, run_case
from tests.random_networks.values import round_once


def complaints(rank: int, case: Case) -> list[str]:
    """Differences from the plain form in a bit, and races."""
    link = transport(case.lanes)
    with quiet(), round_once():
        with device() as mock:
            ours = run_case(case, "fused")
        at_rest(link)
        plain = run_case(case, "plain")
    return [*differences(ours, plain), *dict.fromkeys(mock.races)]


@pytest.mark.parametrize(("size", "cases"), [(2, 25), pytest.param(3, 15, marks=pytest.mark.long)])
def test_fused_is_plain_and_events_order_all(request, ranks, size: int, cases: int) -> None:
    campaign(request, ranks(size), cases, complaints)
