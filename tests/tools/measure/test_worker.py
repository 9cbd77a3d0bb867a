"""What ranks are asked, and what comes back: on real ranks over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commfuse_npu.tools.bench.processes import Ranks, RanksError
from commfuse_npu.tools.measure import worker
from commfuse_npu.tools.measure.exchange import Exchange
from commfuse_npu.tools.measure.worker import Worker
from tests.limits import PATIENT


class Asked(Worker):
    """A worker, and what only tests ask."""

    def arrived(self, peers: list[int], planted: int | None) -> list[int]:
        """What a batch with these distances brings, of whom; ``planted``: who sends other bytes."""
        lane = self._transport.lane_groups[0]
        exchange = Exchange(self._transport, 64, [(lane, peers)])
        if self.rank == planted:
            exchange._mine.fill_(99)
        exchange.begin()
        exchange.end()
        exchange.check()
        ((_, swaps),) = exchange._batches
        return [one.source for one in swaps]

    def elsewhere(self) -> tuple[float, int | None]:
        """A communicator, on a system that does not say what a process has."""
        worker._RESIDENT = Path("/nowhere/statm")
        return self.communicator(None)

    def without_grouped(self) -> dict[str, Any]:
        """GEMMs of rows, where torch takes no groups."""

        def refuse(*args: Any, **flags: Any) -> None:
            raise RuntimeError("not for this device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.torch, "_grouped_mm", refuse, raising=False)
            return self.row_gemms(32, 16, 16, 4, 3)

    def with_second_stream(self) -> dict[str, list[float]]:
        """Sums beside a GEMM, as on a device: here one after the other."""
        with pytest.MonkeyPatch.context() as patch:
            stream = SimpleNamespace(
                do=lambda work, *args: work(*args),
                record=lambda aside: aside,
                hold=lambda event, aside: None,
            )
            patch.setattr(worker, "second_stream", lambda device: stream)
            return self.sums_beside(64, 64, 64, 4, 3)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    seconds = PATIENT.total_seconds()
    with Ranks(3, device="cpu", timeout=seconds, worker=f"{__name__}:Asked") as made:
        yield made


def test_messages_of_a_batch_come_from_whom_they_should(ranks: Ranks) -> None:
    assert ranks.ask("arrived", [1, 2], None) == [[2, 1], [0, 2], [1, 0]]
    for grouped in (False, True):
        (first, *_) = ranks.ask("batches", 4096, 1, 3, grouped=grouped)
        assert [len(first[what]) for what in ("whole", "host")] == [3, 3]
    # Twice: the pipeline's group is there already.
    for lanes in (1, 2):
        assert set(ranks.ask("pipelines", 4096, lanes, 2)[0]) == {"lanes", "pipeline", "both"}


def test_memory_of_a_lane_is_a_figure_or_none(ranks: Ranks) -> None:
    for seconds, taken in ranks.ask("communicator", None):
        assert seconds > 0
        assert (taken is None) != Path("/proc/self/statm").exists()
    assert [taken for _, taken in ranks.ask("elsewhere")] == [None] * 3


def test_a_grouped_gemm_that_is_missing_is_named(ranks: Ranks) -> None:
    found = ranks.ask("without_grouped")[0]
    assert len(found["one by one"]) == 3
    assert found["one call"] is None
    assert found["by"] == "no torch._grouped_mm: not for this device"


def test_sums_are_beside_gemms_where_there_is_a_second_stream(ranks: Ranks) -> None:
    assert ranks.ask("sums_beside", 64, 64, 64, 4, 3) == [{}] * 3
    found = ranks.ask("with_second_stream")[0]
    assert {what: len(times) for what, times in found.items()} == {
        "sums": 3,
        "gemm beside sums": 3,
        "gemm and sums": 3,
    }


def test_messages_that_are_mixed_up_are_noticed(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="64 bytes from rank 1 has other bytes than 2 in it"):
        ranks.ask("arrived", [1], 1)
