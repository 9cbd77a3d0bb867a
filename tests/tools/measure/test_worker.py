"""Questions to the ranks and their answers, on real ranks over gloo."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.tools.measure.steps import Scale, Times
from commfuse_npu.tools.measure.worker import Exchange, Worker
from commfuse_npu.tools.ranks import Ranks, RanksError
from tests.limits import LIMIT, PATIENT

SCALE = Scale.of(find_config("llama3_8b"), 3, "cpu")


class Asked(Worker):
    """A worker with methods that only tests call."""

    def sleep(self, seconds: float) -> None:
        """A question that takes too long."""
        time.sleep(seconds)

    def killed(self, rank: int) -> None:
        """One rank ends without an answer, the other waits."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10 * LIMIT)

    def mixed_up(self) -> None:
        """Rank 1 sends other bytes than its own."""
        exchange = Exchange(self._transport, 64)
        if self.rank == 1:
            exchange._mine.fill_(99)
        exchange.run()
        exchange.check()

    def beside(self, rows: int, size: int) -> dict[str, list[float]]:
        """Times of an exchange of ``size`` bytes beside GEMMs; rank 1 has ``rows`` rows."""
        shape = (rows if self.rank == 1 else 8, 512, 512)
        return self.side_by_side(self._product(*shape), size, 3)

    def posts(self) -> Times:
        """The host's row if posting takes eight seconds."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "_of_host", lambda post, calls: [8.0])
            return self.host(SCALE)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Ranks that all tests of the module share."""
    seconds = PATIENT.total_seconds()
    with Ranks(3, device="cpu", timeout=seconds, worker=f"{__name__}:Asked") as started:
        yield started


@pytest.mark.parametrize(
    ("rows", "size"),
    [(8, 1 << 20), (2048, 64)],  # on one rank the GEMM outlasts the exchange: all run one
)
def test_as_many_gemms_as_all_ranks_can_hide_are_beside_an_exchange(ranks, rows, size) -> None:
    answer = ranks.ask("beside", rows, size)[0]
    assert {kind: len(times) for kind, times in answer.items()} == dict.fromkeys(
        ("gemm", "exchange", "gemm beside", "both"), 3
    )


def test_a_send_and_a_receive_to_each_peer_are_two_posts_on_gloo(ranks: Ranks) -> None:
    assert ranks.ask("posts")[0] == [{"what": "post", "seconds": [2.0]}]


def test_messages_that_are_mixed_up_are_noticed(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="64 bytes from rank 1 has other bytes than 2 in it"):
        ranks.ask("mixed_up")


@pytest.mark.parametrize(
    ("worker", "method", "argument", "seconds", "said"),
    [
        ("no_such_module:Worker", "", 0, LIMIT, r"of 2 failed in starting:\n[\s\S]*no_such_module"),
        (f"{__name__}:Asked", "killed", 1, LIMIT, "rank 1 of 2 died in killed, by SIGKILL"),
        (f"{__name__}:Asked", "sleep", 10 * LIMIT, 1.0,
         "no answer from rank 0, 1 of 2 to sleep within 1 s; give more with --more"),
    ],
)  # fmt: skip
def test_a_rank_that_fails_is_named_and_all_are_ended(
    worker: str, method: str, argument: float, seconds: float, said: str
) -> None:
    def ask() -> None:
        with Ranks(2, device="cpu", timeout=LIMIT, option="--more", worker=worker) as ranks:
            assert len(multiprocessing.active_children()) == len(before) + 2
            ranks.timeout = seconds
            ranks.ask(method, argument)

    before = multiprocessing.active_children()
    with pytest.raises(RanksError, match=said):
        ask()
    assert multiprocessing.active_children() == before
