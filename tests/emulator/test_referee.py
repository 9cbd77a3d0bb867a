"""The referee by itself: messages in, messages out, in an order that processes take rarely."""

from __future__ import annotations

import pytest

from tests.emulator.messages import (
    Communicator,
    Done,
    End,
    Ended,
    Failed,
    Fetch,
    Open,
    Post,
    Read,
    ToRank,
    Wait,
)
from tests.emulator.referee import Referee
from tests.emulator.settings import Settings

LANE = Communicator("lane", (0, 1))
THREAD = 7


class Court:
    """Two ranks of one thread each, whose communicator is open."""

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self.said: list[tuple[int, ToRank]] = []
        self.referee = Referee(2, settings, lambda rank, message: self.said.append((rank, message)))
        self.referee.begin(settings)
        for rank in range(2):
            self.tell(rank, Open((LANE,), THREAD, frozenset({THREAD}), 10.0))
        self.heard()

    def tell(self, rank: int, message: object, now: float = 0.0) -> None:
        self.referee.handle(rank, message, now)  # type: ignore[arg-type]

    def post(self, rank: int, number: int, *verbs: str) -> None:
        ends = tuple(End(verb, 1 - rank, 1, "int8") for verb in verbs)  # type: ignore[arg-type]
        name = " and ".join(verbs)
        self.tell(rank, Post(number, LANE, name, THREAD, ends, None, "send" in verbs))

    def wait(self, rank: int, number: int, data: dict[int, bytes] | None = None) -> None:
        self.tell(rank, Wait(number, THREAD, frozenset({THREAD}), 10.0, data))

    def heard(self) -> list[tuple[int, ToRank]]:
        heard, self.said[:] = list(self.said), []
        return heard


def test_a_transfer_needs_both_ends_and_the_data() -> None:
    court = Court()
    court.post(0, 0, "receive")
    court.wait(0, 0)
    assert court.heard() == []
    court.post(1, 0, "send")
    assert court.heard() == [(1, Fetch(0))]
    court.tell(1, Read(0, {0: b"x"}))
    assert court.heard() == [(0, Done(THREAD, {0: b"x"}))]


def test_data_that_come_after_their_rank_has_waited() -> None:
    """The rank reads its buffer for another one and waits at the same moment."""
    court = Court()
    court.post(0, 0, "receive")
    court.wait(0, 0)
    court.post(1, 0, "send")
    court.wait(1, 0, data=None)
    assert court.heard() == [(1, Fetch(0)), (1, Done(THREAD, {}))]
    court.tell(1, Read(0, {0: b"x"}))
    assert court.heard() == [(0, Done(THREAD, {0: b"x"}))]


def test_a_batch_is_complete_as_a_whole() -> None:
    court = Court()
    court.post(0, 0, "send", "receive")
    court.wait(0, 0, {0: b"a"})
    court.post(1, 0, "receive")
    court.wait(1, 0)
    assert court.heard() == [(1, Done(THREAD, {0: b"a"}))]
    court.post(1, 1, "send")
    assert court.heard() == [(1, Fetch(1))]
    court.wait(1, 1, {0: b"b"})
    assert sorted(court.heard(), key=str) == [(0, Done(THREAD, {1: b"b"})), (1, Done(THREAD, {}))]


def test_what_is_posted_later_waits_for_what_is_in_front() -> None:
    """Rank 1's second send has its receive; its batch in front needs a send of rank 0's."""
    court = Court()
    court.post(1, 0, "send", "receive")
    court.post(1, 1, "send")
    court.post(0, 0, "receive")
    court.post(0, 1, "receive")
    court.wait(0, 1)
    assert court.heard() == []
    court.referee.settle()
    assert "deadlock: a cycle of ranks 0 -> 1 -> 0\n" in failure(court, 0)


def test_a_rank_that_runs_may_still_do_anything() -> None:
    court = Court()
    court.post(0, 0, "receive")
    court.wait(0, 0)
    court.referee.settle()
    assert court.heard() == []
    court.tell(1, Ended(1, None))
    court.referee.settle()
    assert "deadlock: ranks 0 -> 1\n" in failure(court, 0)


def failure(court: Court, to: int) -> str:
    ((rank, told),) = court.heard()
    assert rank == to
    assert isinstance(told, Failed)
    return told.report


def test_transfers_take_their_time() -> None:
    court = Court(Settings(max_delay=1.0))
    court.post(0, 0, "receive")
    court.wait(0, 0)
    court.post(1, 0, "send")
    court.wait(1, 0, {0: b"x"})
    court.referee.settle()
    assert court.heard() == []
    due = court.referee.due()
    assert due is not None
    assert 0 < due <= 1.0
    court.referee.tick(due)
    assert sorted(rank for rank, _ in court.heard()) == [0, 1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_wait_for_nothing_known_is_an_error(number: int) -> None:
    court = Court()
    court.wait(0, number)
    assert "posted by another function" in failure(court, 0)
