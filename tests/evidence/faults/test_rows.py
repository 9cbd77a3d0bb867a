"""Some rows of the table, with real processes, and faults of the rows themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from scripts.evidence.faults import left_over
from scripts.evidence.faults.catalogue import scenarios
from scripts.evidence.faults.judge import problems
from scripts.evidence.faults.processes import Player
from scripts.evidence.faults.scenario import Scenario
from scripts.evidence.faults.training import accidents, play_trainings
from tests.limits import LIMIT

# A busy machine must not fail a row: what hangs is killed at a limit of its own.
TIMEOUT, MARGIN = 20.0, 60.0

if not sys.platform.startswith("linux"):
    pytest.skip("the rows look into /proc", allow_module_level=True)


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    with Player() as playing:
        yield playing


LONG = (
    "killed/all_gather_linear/first_use/middle/3_ranks",
    "killed/all_gather_linear/forward/middle/4_ranks",
    "slow/Buckets/forward/middle/3_ranks",
    "one_connection_lost/linear_reduce_scatter/forward/middle/4_ranks",
    "no_lane:_too_many_open_files/Transport.create/making_lanes/middle/3_ranks",
)


@pytest.mark.parametrize(
    "name",
    [
        "killed/all_gather_linear/backward/middle/3_ranks",
        "user_error/gather_use/forward/middle/3_ranks",
        "mismatch/dtype/forward/middle/3_ranks",
        "no_memory_for_scratch/linear_reduce_scatter/forward/middle/3_ranks",
        # What is taken late fails before the post that comes next.
        "no_memory_for_scratch/all_gather_linear/backward/last/3_ranks",
        *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    ],
)
def test_rows(player: Player, name: str) -> None:
    (scenario,) = (row for row in scenarios(quick=False) if row.name == name)
    played = player.play(replace(scenario, timeout=TIMEOUT))
    assert problems(played, margin=MARGIN) == []


@pytest.mark.long
def test_a_training_has_its_accident() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    (found,) = play_trainings(accidents(quick=True))
    assert found.problems == ()


def test_no_two_rows_have_the_same_name() -> None:
    names = [row.name for row in scenarios(quick=False)]
    assert len(names) == len(set(names))


def test_ranks_that_hang_are_killed_and_said_to_hang(player: Player) -> None:
    """The limit is over before the slow rank wakes up."""
    found = problems(player.play(Scenario("too slow", "Buckets"), limit=2.0), margin=MARGIN)
    assert "rank 1: it hung and was killed" in found


def test_a_process_that_is_left_over_is_found_and_ended(monkeypatch) -> None:
    monkeypatch.setattr(left_over, "_PATIENCE", 0.1)
    mark = f"test-{os.getpid()}"
    sleeper = subprocess.Popen(["sleep", "300"], env={**os.environ, left_over.MARK: mark})
    try:
        assert left_over.marked(mark, besides={sleeper.pid}) == {}
        # In the middle of its exec a process has no environment to be read.
        end = time.monotonic() + 60
        while not left_over.marked(mark, besides=set()) and time.monotonic() < end:
            time.sleep(0.05)
        assert left_over.end(mark, besides=set()) == ("sleep 300",)
        assert sleeper.wait(timeout=LIMIT) == -9
        assert left_over.end(mark, besides=set()) == ()
    finally:
        sleeper.kill()
