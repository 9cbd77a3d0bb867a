"""The processes of ranks of which one is asked alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest
import torch

from commfuse_npu.tools.bench import processes
from commfuse_npu.tools.bench.processes import Ranks, RanksError
from tests.limits import LIMIT


class Asked:
    """What a rank does in these tests."""

    def process(self) -> int:
        return os.getpid()

    def wait_for_ever(self) -> None:
        threading.Event().wait()


def test_a_rank_that_dies_while_another_one_is_asked_is_named() -> None:
    before = set(multiprocessing.active_children())
    worker = f"{Asked.__module__}:{Asked.__name__}"
    with Ranks(3, device="cpu", timeout=LIMIT, worker=worker, one_device=True) as ranks:
        asked = ranks.ask("process")
        assert ranks.ask_first("process") == asked[0]
        os.kill(asked[2], signal.SIGKILL)
        with pytest.raises(RanksError, match="rank 2 of 3 died during wait_for_ever"):
            ranks.ask_first("wait_for_ever")
        assert set(multiprocessing.active_children()) == before


def test_streams_of_cuda_have_a_queue_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    for name in ("set_num_threads", "set_flush_denormal"):
        monkeypatch.setattr(torch, name, lambda value: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    start = {"rank": 0, "size": 4, "store": "", "namespace": None, "timeout": 1.0, "worker": ""}
    with pytest.raises(RuntimeError, match=r"cuda with 4 ranks takes 1 of them, torch .* finds 0"):
        processes._join(**start, device="cuda", one_device=True)  # type: ignore[arg-type]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
