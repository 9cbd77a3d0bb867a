"""Scratch arenas are reused."""

from types import SimpleNamespace

import pytest
import torch

from commfuse_npu.runtime.scratch import ScratchPool

CPU = torch.device("cpu")


def test_an_arena_comes_back_and_serves_who_needs_less() -> None:
    pool = ScratchPool()
    long = pool.take(1000, torch.float32, CPU)
    assert (pool.lent, pool.idle_bytes) == (1, 0)
    pool.give_back(long)
    assert pool.take(1000, torch.float32, CPU) is long
    other = pool.take(600, torch.float32, CPU)
    pool.give_back(long)
    pool.give_back(other)
    assert pool.idle_bytes == 4 * (1000 + 600)
    assert pool.take(590, torch.float32, CPU) is other, "the shortest that will do"
    assert pool.take(590, torch.float32, CPU) is long


def test_nothing_else_serves() -> None:
    """No reuse of an arena that is too short, over twice too long, or of another dtype."""
    pool = ScratchPool()
    arena = pool.take(1000, torch.float32, CPU)
    for request in ((1001, torch.float32), (499, torch.float32), (1000, torch.bfloat16)):
        pool.give_back(arena)
        assert pool.take(*request, CPU) is not arena
        assert pool.take(1000, torch.float32, CPU) is arena


def test_what_is_kept_is_limited() -> None:
    pool = ScratchPool(keep_bytes=1024)
    first, second = (pool.take(n, torch.float32, CPU) for n in (128, 200))
    pool.give_back(first)
    pool.give_back(second)
    assert pool.idle_bytes == second.nbytes
    assert pool.take(200, torch.float32, CPU) is second


def test_memory_is_used_again_on_the_stream_that_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(stream_id=1)
    module = SimpleNamespace(current_stream=lambda device: current)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    pool, request = ScratchPool(), (64, torch.float32, torch.device("meta"))
    arena = pool.take(*request)
    pool.give_back(arena)
    current.stream_id = 2
    assert pool.take(*request) is not arena
    current.stream_id = 1
    assert pool.take(*request) is arena
