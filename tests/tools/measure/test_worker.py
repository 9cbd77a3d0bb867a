"""What ranks are asked, and what comes back: on real ranks over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commfuse_npu.tools.measure import worker
from commfuse_npu.tools.measure.worker import Exchange, Worker
from commfuse_npu.tools.ranks import Ranks, RanksError
from tests.limits import PATIENT


class Asked(Worker):
    """A worker, and what only tests ask."""

    def arrived(self, lanes: int, planted: int | None) -> list[int]:
        """From whom messages came; ``planted``: the rank that sends other bytes."""
        exchange = Exchange(self._transport, 64, lanes)
        if self.rank == planted:
            exchange._mine.fill_(99)
        exchange.run()
        exchange.check()
        return [source for *_, source in exchange.swaps]

    def slow_beside(self) -> dict[str, list[float]]:
        """The same where GEMMs of rank 1 take longer than the exchange."""
        shape = (2048, 512, 512) if self.rank == 1 else (8, 8, 8)
        return self.beside(*shape, 64, 3)

    def elsewhere(self) -> tuple[float, int | None]:
        """A communicator, on a system that does not say what a process has."""
        worker._RESIDENT = Path("/nowhere/statm")
        return self.communicator(None)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    seconds = PATIENT.total_seconds()
    with Ranks(3, device="cpu", timeout=seconds, worker=f"{__name__}:Asked") as made:
        yield made


def test_messages_come_from_whom_they_should(ranks: Ranks) -> None:
    assert ranks.ask("arrived", 2, None) == [[2, 1], [0, 2], [1, 0]]
    assert ranks.ask("arrived", 1, None) == [[2], [0], [1]]


def test_as_many_gemms_as_all_ranks_can_hide_are_beside_an_exchange(ranks: Ranks) -> None:
    found = ranks.ask("beside", 8, 8, 8, 1 << 20, 3)[0]
    assert {what: len(times) for what, times in found.items()} == dict.fromkeys(
        ("gemm", "exchange", "gemm beside", "both"), 3
    )
    # On one rank a GEMM outlasts the exchange: one GEMM on all.
    assert len(ranks.ask("slow_beside")[0]["both"]) == 3


def test_memory_of_a_lane_is_a_figure_or_none(ranks: Ranks) -> None:
    for seconds, taken in ranks.ask("communicator", None):
        assert seconds > 0
        assert (taken is None) != Path("/proc/self/statm").exists()
    assert [taken for _, taken in ranks.ask("elsewhere")] == [None] * 3


def test_messages_that_are_mixed_up_are_noticed(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="64 bytes from rank 1 has other bytes than 2 in it"):
        ranks.ask("arrived", 1, 1)
