"""The judge says no to what must not happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.evidence.faults.judge import problems, said
from scripts.evidence.faults.processes import Played, Report
from scripts.evidence.faults.scenario import Scenario

WAITED = (
    "rank {rank} of 3 (global rank {rank}): all_gather_linear re-gather: receiving block 1 chunk 0 "
    "(8 x torch.float32), peer 1, step 3 of 4, lane 1: Connection closed by peer. This transport "
    "cannot be used any more"
)
DIFFERS = (
    "rank {rank} of 3 (global rank {rank}): all_gather_linear: rank {rank} and peer {peer} of the "
    "group do not call the same: block: (6, 4) here, (7, 4) there. Nothing was sent; call it alike "
    "on all ranks. This transport cannot be used any more"
)
TRANSPORT = ("TransportError", "RuntimeError", "Exception")


def survivor(rank: int, message: str = WAITED) -> Report:
    return Report(
        rank=rank,
        exit_code=1,
        kinds=TRANSPORT,
        message=message.format(rank=rank),
        after=0.1,
        output="Traceback (most recent call last):\nTransportError: ...",
    )


def killed() -> Played:
    """Rank 1 of 3 was killed, and all is as it has to be."""
    reports = (survivor(0), Report(rank=1, exit_code=-9), survivor(2))
    scenario = Scenario("killed", "all_gather_linear", "backward")
    return Played(scenario, reports, struck=True, left=())


def with_report(played: Played, report: Report) -> Played:
    reports = list(played.reports)
    reports[report.rank] = report
    return replace(played, reports=tuple(reports))


def test_a_row_that_is_right() -> None:
    assert problems(killed()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exit_code": None, "kinds": ()}, "rank 2: it hung and was killed"),
        ({"kinds": (), "exit_code": 0, "right": True}, "it reported nothing"),
        ({"exit_code": 0}, "exit code 0 instead of 1"),
        ({"exit_code": -6}, "exit code -6 instead of 1"),
        ({"message": WAITED.format(rank=2).replace("peer 1", "a peer")}, "name the peer"),
        ({"message": WAITED.format(rank=2).replace("peer 1", "peer 2")}, "name the peer"),
        ({"message": WAITED.format(rank=2).replace("step 3 of 4", "")}, "name the step"),
        ({"message": WAITED.format(rank=2).replace("all_gather", "x")}, "name the operation"),
        ({"kinds": ("RuntimeError",)}, "RuntimeError instead of a TransportError"),
        ({"after": 100.0}, "it reported after 100.0 s; the limit is 8 s"),
        ({"after": None}, "it reported after None s"),
        ({"output": "Segmentation fault"}, "no traceback of its error"),
    ],
)
def test_a_survivor_that_does_not_do_its_part(change: dict[str, object], words: str) -> None:
    played = with_report(killed(), replace(survivor(2), **change))
    found = problems(played)
    assert found
    assert all(problem.startswith("rank 2: ") for problem in found)
    assert any(words in problem for problem in found)


def test_an_orphan() -> None:
    assert problems(replace(killed(), left=("python rank.py",))) == ["left over: python rank.py"]


def test_a_fault_that_did_not_happen() -> None:
    assert problems(replace(killed(), struck=False)) == ["the fault did not happen"]


def test_a_rank_that_was_not_killed() -> None:
    played = with_report(killed(), Report(rank=1, exit_code=0, right=True))
    assert problems(played) == ["rank 1: exit code 0 instead of -9"]


@pytest.mark.parametrize("change", [{"exit_code": 1}, {"right": False}, {"right": None}])
def test_a_slow_rank_may_cost_time_only(change: dict[str, object]) -> None:
    reports = tuple(Report(rank=rank, exit_code=0, right=True) for rank in range(3))
    played = Played(Scenario("slow", "Buckets"), reports, struck=True, left=())
    assert problems(played) == []
    played = with_report(played, replace(reports[0], **change))
    assert problems(played) == ["rank 0: it did not finish with the bits of the plain form"]


def test_a_program_keeps_its_own_error() -> None:
    own = replace(
        survivor(1),
        kinds=("UserError", "Exception"),
        message="a mistake in the program",
        output="Traceback ...\nUserError: a mistake in the program",
    )
    scenario = Scenario("user error", "all_gather_linear", "between")
    played = replace(with_report(killed(), own), scenario=scenario)
    assert problems(played) == []
    found = problems(with_report(played, survivor(1)))
    assert len(found) == 1
    assert "it has to be its own UserError" in found[0]


def test_a_mismatch_has_both_values() -> None:
    reports = tuple(
        replace(
            survivor(rank, DIFFERS.replace("{peer}", "1" if rank != 1 else "0")),
            kinds=("MismatchError", *TRANSPORT),
            output="Traceback ... MismatchError",
        )
        for rank in range(3)
    )
    played = Played(Scenario("mismatch", "shape"), reports, struck=True, left=())
    assert problems(played) == []
    without = replace(reports[0], message=reports[0].message.replace(" here", ""))
    assert "both values" in problems(with_report(played, without))[0]
    other_kind = replace(reports[0], kinds=TRANSPORT, output="Traceback ... TransportError")
    assert "not a MismatchError" in problems(with_report(played, other_kind))[0]


def test_what_a_rank_said_in_short() -> None:
    played = killed()
    assert said(played.scenario, played.reports[0]) == (
        "TransportError: all_gather_linear re-gather, peer 1, step 3 of 4, connection gone"
    )
    assert said(played.scenario, played.reports[1]) == "signal 9"
