"""Questions to the ranks and their answers, on real ranks over gloo."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools import ranks as module
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.measure.measuring_steps import Scale
from commfuse_npu.tools.measure.measuring_worker import Worker
from commfuse_npu.tools.ranks import Ranks, RanksError
from tests.distributed.ranks import forkserver, on_ranks
from tests.limits import LIMIT


@on_ranks(3)
def test_a_post_is_a_batch_per_peer(rank: int) -> None:
    worker: Any = Worker()
    worker._of_host = lambda post, calls: [8.0]
    scale = Scale.of(find_config("llama3_8b"), 3, "cpu")
    assert worker.host(scale) == [{"what": "post", "seconds": [4.0]}]
    worker.transport.close()


class Asked:
    """A worker whose answers fail."""

    def sleep(self, seconds: float) -> None:
        """A question that takes too long."""
        time.sleep(seconds)

    def killed(self, rank: int) -> None:
        """One rank ends without an answer, the other waits."""
        if os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10 * LIMIT)


@pytest.mark.parametrize(
    ("worker", "method", "argument", "seconds", "said"),
    [
        (f"{__name__}:Asked", "", 0, 0.01, "0, 1 of 2 to starting within 0 s; give more with --m"),
        ("no_such_module:Worker", "", 0, LIMIT, r"of 2 failed in starting:\n[\s\S]*no_such_module"),
        (f"{__name__}:Asked", "killed", 1, LIMIT, "rank 1 of 2 died in killed, by SIGKILL"),
        (f"{__name__}:Asked", "sleep", 10 * LIMIT, 1.0,
         "no answer from rank 0, 1 of 2 to sleep within 1 s; give more with --more"),
    ],
)  # fmt: skip
def test_a_rank_that_fails_is_named_and_all_are_ended(
    worker: str, method: str, argument: float, seconds: float, said: str, monkeypatch
) -> None:
    def ask() -> None:
        limit = LIMIT if method else seconds
        with Ranks(2, device="cpu", timeout=limit, option="--more", worker=worker) as ranks:
            assert len(set(multiprocessing.active_children()) - before) == 2
            ranks.timeout = seconds
            ranks.ask(method, argument)

    monkeypatch.setattr(module, "_context", forkserver)
    before = set(multiprocessing.active_children())
    with pytest.raises(RanksError, match=said):
        ask()
    assert set(multiprocessing.active_children()) == before


def test_a_signal_as_ranks_start_leaves_no_folder(monkeypatch, tmp_path: Path) -> None:
    made = os.mkdir

    def mkdir(*args: Any, **named: Any) -> None:
        made(*args, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.mkdir", mkdir)
    with pytest.raises(KeyboardInterrupt):
        Ranks(1, device="cpu", timeout=LIMIT)
    assert not list(tmp_path.iterdir())
