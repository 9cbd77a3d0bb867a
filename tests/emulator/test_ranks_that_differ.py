"""A rank that skips, ends, dies, or calls something else: the others are told, and do not hang."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.emulator import planted
from tests.emulator.emulated_ranks import EmulatedRanks


def reports(emulated, size: int, program: planted.Program, warm: bool = False) -> list[str]:
    return [outcome.value for outcome in emulated(size).outcomes(planted.told, program, warm)]


def test_a_skipped_transfer(emulated) -> None:
    """Three ranks; in step 2 rank 0 sends to 2, 1 to 0, and 2 to 1."""
    found = reports(emulated, 3, planted.transfer_skipped, warm=True)
    assert found[1] == ""
    assert found[0].startswith("DeadlockError: deadlock: ranks 0 -> 1\n")
    assert "rank 0 has to receive 4 x float32 from rank 1" in found[0]
    assert "rank 1 has not posted the send" in found[0]
    assert "rank 1 has ended its function and does nothing more" in found[0]
    assert found[2].startswith("DeadlockError: deadlock: ranks 2 -> 1\n")
    assert "rank 1 has not posted the receive" in found[2]


def test_a_first_batch_without_everybody(emulated) -> None:
    """The group's communicator is opened by all its ranks."""
    found = reports(emulated, 3, planted.first_batch_of_two)
    assert found[2] == ""
    for report in found[:2]:
        assert "opens the communicator of group" in report
        assert "which rank 2 has not come to open" in report


def test_two_threads_on_one_group(emulated) -> None:
    for report in reports(emulated, 2, planted.two_threads, warm=True):
        assert report.startswith("RuleError: ")
        assert "from a second thread while batch (send 4 x float32 to rank" in report


def test_another_collective(emulated) -> None:
    for report in reports(emulated, 2, planted.other_collective, warm=True):
        assert report.startswith("RuleError: the ranks of the communicator of group")
        assert "all_reduce (sum) of 4 x float32" in report
        assert "all_reduce (sum) of 5 x float32" in report


def test_another_size(emulated) -> None:
    found = reports(emulated, 2, planted.other_size, warm=True)
    for report in found:
        assert report.startswith("RuleError: the two ends of a transfer")
        assert "receive 8 x float32 from rank 0" in report


def test_two_sends_with_one_rank_in_a_batch(emulated) -> None:
    for report in reports(emulated, 2, planted.same_peer_twice, warm=True):
        assert "a batch with two sends of one rank" in report


def dies(rank: int) -> str:
    group = dist.new_group()
    dist.barrier(group)
    if rank == 1:
        os._exit(1)
    try:
        dist.barrier(group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_dies() -> None:
    ranks = EmulatedRanks(3)
    try:
        start = time.monotonic()
        found = ranks.outcomes(dies, may_die=True)
        assert time.monotonic() - start < 60
    finally:
        ranks.kill()
    assert isinstance(found[1].error, EOFError)
    for rank in (0, 2):
        assert f"deadlock: ranks {rank} -> 1" in found[rank].value
        assert "the process of rank 1 is gone" in found[rank].value


def stays_away(rank: int) -> str:
    """Rank 1 does something else, of which the referee knows nothing, until rank 0 has given up."""
    group, store = dist.new_group(), dist.distributed_c10d._get_default_store()
    dist.barrier(group)
    if rank == 1:
        store.wait(["rank 0 gave up"])
        return ""
    try:
        dist.barrier(group, async_op=True).wait(timedelta(seconds=0.2))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.set("rank 0 gave up", "yes")
    return ""


def test_a_wait_has_a_time_limit(emulated) -> None:
    """What the referee cannot know ends in time as well: rank 1 might still come."""
    found = [outcome.value for outcome in emulated(2).outcomes(stays_away)]
    assert found[0].startswith("OverdueError: no progress within the time limit: ranks 0 -> 1")
    assert "rank 1 is running its own code" in found[0]


def sends_and_forgets(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.ones(4), 1)
    else:
        dist.irecv(torch.ones(3), 0)


def test_what_never_took_place_fails_the_test() -> None:
    ranks = EmulatedRanks(2)
    try:
        with pytest.raises(pytest.fail.Exception, match="never took place"):
            ranks.run(sends_and_forgets)
    finally:
        ranks.kill()
