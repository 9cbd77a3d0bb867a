"""Random cases, each rank alone; more with ``--random-cases``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.one_device import alone
from tests.one_device.backend import register
from tests.one_device.device_streams import DeviceStreams
from tests.one_device.race_detector import Module, RaceDetector
from tests.one_device.recording import ReplayError
from tests.random_networks import compare
from tests.random_networks.case import BucketRun, Case, Form, Layer, Network
from tests.random_networks.transports import transport_of
from tests.random_networks.values import Found


@pytest.mark.parametrize(("size", "cases"), [(2, 20), (3, 10)])
def test_alone_is_plain(random_cases: Any, size: int, cases: int) -> None:
    random_cases(size, cases, seed=2611, compare=alone.complaints_alone)


def what_ends_a_run(rank: int, case: Case) -> list[str]:
    runs = []

    def run_case(case: Case, form: Form) -> Found:
        runs.append(form)
        if runs == ["fused", "fused"]:
            raise ReplayError("not what was recorded")
        return compare.run_case(case, form)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alone, "run_case", run_case)
        return alone.complaints_alone(rank, case)


def test_what_ends_a_run_alone_is_a_complaint(ranks: Any) -> None:
    case = Network(2, (Layer("linear_reduce_scatter"),))
    assert ranks(2).run(what_ends_a_run, case) == [["not what was recorded"]] * 2


def races(rank: int, case: Case) -> list[str]:
    device, module = register(), Module()
    transport_of(case)
    with compare.quiet(), pytest.MonkeyPatch.context() as patch:
        if isinstance(case, BucketRun):
            compare.run_case(case, "fused")
        with device.recording() as recording:
            compare.run_case(case, "fused")
        compare.at_rest_or_raise(case)
        patch.setattr(device, "new_streams", partial(DeviceStreams, module))
        with RaceDetector(module) as detector, device.replaying(recording):
            compare.run_case(case, "fused")
    compare.at_rest_or_raise(case)
    return list(dict.fromkeys(detector.races))


@pytest.mark.parametrize(("size", "cases"), [(2, 10), (3, 5)])
def test_events_order_what_streams_of_a_device_do(random_cases: Any, size: int, cases: int) -> None:
    random_cases(size, cases, seed=2611, compare=races)
