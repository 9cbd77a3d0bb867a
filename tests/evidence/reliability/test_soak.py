"""The soak notices what leaks, and says nothing where nothing does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from commfuse_npu.runtime.scratch import ScratchPool
from commfuse_npu.runtime.transport import Transport
from scripts.evidence import soak as command
from scripts.evidence.process_state import ProcessState
from scripts.evidence.soak import complaints, soak
from tests.limits import PATIENT

_kept: list[Any] = []


@lru_cache
def link() -> Transport:
    return Transport.create(lanes=2, timeout=PATIENT)


def what_grew(rank: int, leak: Callable[[], None] | None = None) -> list[str]:
    """A soak of four iterations, with a leak after each."""
    states = []
    for _, state in soak(link(), 4, every=1, seed=1):
        states.append(state)
        if leak is not None:
            leak()
    _kept.clear()
    return complaints(states)


def a_thread() -> None:
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    _kept.append(_Stop(stop))


class _Stop:
    """Ends a thread when it is forgotten."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __del__(self) -> None:
        self.event.set()


def a_socket() -> None:
    _kept.append(socket.socket())


def a_tensor() -> None:
    _kept.append(torch.zeros(1))


def memory() -> None:
    _kept.append(b"x" * (8 << 20))


LEAKS = {"threads": a_thread, "sockets": a_socket, "tensors": a_tensor, "memory": memory}


def test_a_healthy_run_keeps_nothing(ranks) -> None:
    for grew in ranks(2).run(what_grew):
        # So few iterations say little about memory.
        assert not [line for line in grew if not line.startswith("memory")]


@pytest.mark.parametrize(
    "what", ["tensors", *(pytest.param(w, marks=pytest.mark.long) for w in LEAKS if w != "tensors")]
)
def test_a_leak_is_noticed(ranks, what: str) -> None:
    for grew in ranks(2).run(what_grew, LEAKS[what]):
        assert any(line.startswith(f"{what} grew") for line in grew), grew


def without_finishing(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "finished", lambda self, exchange: None)
        found = what_grew(rank)
    link()._in_flight.clear()
    return found


@pytest.mark.long
def test_plans_that_are_never_finished_are_noticed(ranks) -> None:
    for grew in ranks(2).run(without_finishing):
        assert any(line.startswith("in_flight grew") for line in grew), grew
        assert any(line.startswith("handles grew") for line in grew), grew


def without_giving_back(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScratchPool, "give_back", lambda self, arena: None)
        found = what_grew(rank)
    link().scratch.lent = 0
    return found


@pytest.mark.long
def test_buffers_that_do_not_come_back_are_noticed(ranks) -> None:
    for grew in ranks(2).run(without_giving_back):
        assert any(line.startswith("lent grew") for line in grew), grew


AT_REST = ProcessState(0, 300_000, 12, 16, 0, 0, 0, 500, 112, 0, 290_000)


def samples(change: Callable[[int], dict[str, int]]) -> list[ProcessState]:
    return [
        replace(AT_REST, iteration=iteration, **change(iteration))
        for iteration in range(50, 1001, 50)
    ]


@pytest.mark.parametrize(
    ("change", "grew"),
    [
        (lambda i: {}, []),
        (lambda i: {"rss_kib": 300_000 + 10 * i}, []),
        (
            lambda i: {"rss_kib": 300_000 + 30 * i},
            ["memory grew by 30.0 KiB per iteration; 22.3 are allowed"],
        ),
        # Explained by what the pool keeps, and by what was agreed.
        (lambda i: {"rss_kib": 300_000 + 60 * i, "idle_kib": 50 * i, "agreed": 10 * i}, []),
        # In the warm-up only.
        (lambda i: {"rss_kib": min(400_000, 300_000 + 1000 * i), "tensors": min(i, 200)}, []),
        (lambda i: {"sockets": 12 + i // 900}, ["sockets grew from 12 to 13"]),
        (lambda i: {"threads": 16 - i // 900}, []),
    ],
)
def test_the_verdict(change: Callable[[int], dict[str, int]], grew: list[str]) -> None:
    assert complaints(samples(change)) == grew


@pytest.mark.parametrize(
    "arguments", [["--iterations", "2"], ["--iterations", "9", "--every", "4"]]
)
def test_too_few_samples_are_refused(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "samples that a verdict needs" in capsys.readouterr().err
