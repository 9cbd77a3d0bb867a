"""The judge of whole trainings says no to what must not happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.evidence.faults.training import Course, Disturbed, Ended, problems

LOSSES = {iteration: 5.0 - iteration / 8 for iteration in range(1, 7)}
SAID = (
    "[rank0]: RuntimeError: Connection closed by peer\n"
    "[rank0]: commfuse_npu.runtime.transport.TransportError: rank 0 of 2 (global rank 0): "
    "all_gather_linear dgrad: receiving partial for 0, peer 1, step 1 of 1, lane 0: closed\n"
)


def right() -> Course:
    whole = Ended(0, "", LOSSES, "ab" * 32, after=None, left=())
    broken = Ended(137, SAID, {}, "", after=3.0, left=())
    row = Disturbed("killed", "backward", "dgrad:", ())
    return Course(row, whole, broken, "3", resumed=whole)


def test_a_row_that_is_right() -> None:
    assert problems(right()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exit_code": 0}, "its exit code is 0"),
        ({"exit_code": None}, "it hung and was killed"),
        ({"left": ("python -m rank",)}, "left over: python -m rank"),
        ({"after": None}, "the accident did not happen"),
        ({"after": 100.0}, "it ended 100.0 s after the accident"),
        ({"output": ""}, "rank 0, which survived, raised nothing"),
        ({"output": SAID.replace("peer 1", "a peer")}, "rank 0 did not name step and peer"),
        ({"output": SAID.splitlines()[0]}, "rank 0 did not name step and peer: RuntimeError"),
    ],
)
def test_a_training_that_ends_badly(change: dict[str, object], words: str) -> None:
    course = right()
    (found,) = problems(replace(course, broken=replace(course.broken, **change)))
    assert words in found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exit_code": 1}, "resuming ended with 1"),
        ({"losses": {**LOSSES, 6: 4.25000001}}, "losses {"),
        ({"losses": {}}, "losses {"),
        ({"weights": "cd" * 32}, "the weights are not those"),
    ],
)
def test_a_training_that_goes_on_otherwise(change: dict[str, object], words: str) -> None:
    course = right()
    (found,) = problems(replace(course, resumed=replace(course.resumed, **change)))
    assert words in found


def test_another_checkpoint() -> None:
    assert problems(replace(right(), checkpoint="none")) == [
        "the last checkpoint is none instead of 3"
    ]


def test_a_program_keeps_its_own_error() -> None:
    course = right()
    course = replace(course, row=replace(course.row, fault="user error"))
    assert problems(course) == ["rank 1 did not end with its own error"]
    own = SAID + "[rank1]: scripts.evidence.faults.operations.UserError: a mistake in the program\n"
    assert problems(replace(course, broken=replace(course.broken, output=own))) == []
