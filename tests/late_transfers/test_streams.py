"""On late streams, and by events alone, layers have their bits; a fault shows every time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from commfuse_npu.runtime.transport import Transport
from tests.late_transfers import late
from tests.late_transfers.layers import (
    Fault,
    case,
    computed,
    event_of_the_wrong_stream,
    missing_event,
    missing_last_event,
    no_wait,
    planted,
    sends_not_waited_for,
    sound,
    wait_on_the_wrong_stream,
)
from tests.late_transfers.race_detector import Module, RaceDetector, Stream
from tests.limits import BRIEF, PATIENT
from tests.random_networks.compare import differences


def said_of(rank: int, fault: Fault, chunks: int, batched: bool) -> str:
    """What tells of a fault in the programs; "" if nothing does."""
    link = Transport.create(lanes=2, timeout=PATIENT, batched=batched)
    of = case(link.size, chunks)
    plain = computed(of, "plain", link)
    link.timeout = BRIEF if fault is wait_on_the_wrong_stream else PATIENT
    late.finish()
    try:
        with planted(fault):
            found = computed(of, "fused", link)
        late.finish()
    except (IndexError, KeyError):
        # What is aside finds nothing any more of the operation that it belongs to.
        return "the operation was over before what is aside"
    return "other bits" if differences(found, plain) else ""


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_late_streams_change_no_bit(ranks: Any, size: int, chunks: int, batched: bool) -> None:
    assert ranks(size).run(said_of, sound, chunks, batched) == [""] * size


@pytest.mark.parametrize(
    ("fault", "tells"),
    [
        (missing_event, "other bits|changed before its wait"),
        (no_wait, "other bits|changed before its wait"),
        (missing_last_event, "over before what is aside"),
        (event_of_the_wrong_stream, "over before what is aside"),
        (wait_on_the_wrong_stream, "over before what is aside"),
        (sends_not_waited_for, "changed before its wait"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_a_fault_is_caught(ranks: Any, size: int, chunks: int, fault: Fault, tells: str) -> None:
    # A batch is over with its receive; single posts have a wait for what is sent.
    batched = fault is not sends_not_waited_for
    # A rank that is found out leaves the others waiting.
    outcomes = ranks(size).outcomes(said_of, fault, chunks, batched)
    assert any(re.search(tells, one.value or str(one.error)) for one in outcomes), outcomes
    assert all(one.value != "" for one in outcomes)


# ---------------------------------------------------------------------- by events alone


def races(rank: int, fault: Fault, of_streams: Callable[[Any], None], chunks: int) -> list[str]:
    link, module = Transport.create(lanes=2, timeout=PATIENT), Module()
    of = case(link.size, chunks)
    plain = computed(of, "fused", link)
    with pytest.MonkeyPatch.context() as patch:
        of_streams(patch)
        with late.streams_of(module), planted(fault), RaceDetector(module) as detector:
            found = computed(of, "fused", link)
    # Kernels ran at once, in the order of the host.
    assert not differences(found, plain)
    return list(dict.fromkeys(detector.races))


def no_fault(patch: pytest.MonkeyPatch) -> None:
    pass


def nobody_waits_for_events(patch: pytest.MonkeyPatch) -> None:
    """Neither a lane for what posts on it, nor one stream for the other."""
    patch.setattr(Stream, "wait_event", lambda self, event: None)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_races(ranks: Any, size: int, chunks: int) -> None:
    assert ranks(size).run(races, sound, no_fault, chunks) == [[]] * size


@pytest.mark.parametrize(
    ("fault", "of_streams"), [(sound, nobody_waits_for_events), (missing_event, no_fault)]
)
def test_a_missing_event_is_a_race(
    ranks: Any, fault: Fault, of_streams: Callable[[Any], None]
) -> None:
    assert all(ranks(2).run(races, fault, of_streams, 3))
