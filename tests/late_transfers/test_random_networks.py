"""Random cases with late transfers posted in batches; more with ``--random-cases``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.late_transfers import late
from tests.late_transfers.race_detector import Module, RaceDetector
from tests.random_networks import compare
from tests.random_networks.case import Case
from tests.random_networks.transports import at_rest, transport_of


def in_batches(rank: int, case: Case) -> list[str]:
    return compare.complaints(rank, replace(case, batched=True))


@pytest.mark.parametrize(("size", "cases"), [(2, 20), (3, 10)])
def test_fused_is_plain(random_cases: Any, size: int, cases: int) -> None:
    random_cases(size, cases, in_batches)


def races(rank: int, case: Case) -> list[str]:
    module, case = Module(), replace(case, batched=True)
    with compare.quiet():
        compare.run_case(case, "fused")
        at_rest(transport_of(case))
        with late.streams_of(module), RaceDetector(module) as detector:
            compare.run_case(case, "fused")
    at_rest(transport_of(case))
    return list(dict.fromkeys(detector.races))


@pytest.mark.parametrize(("size", "cases"), [(2, 10), (3, 5)])
def test_events_order_what_streams_of_a_device_do(random_cases: Any, size: int, cases: int) -> None:
    random_cases(size, cases, races)
