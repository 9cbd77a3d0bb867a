"""What is tried, which alternative wins on synthetic times, and answers on disk."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.ops import tuning
from commfuse_npu.ops.tuning import candidates, fastest
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import GatherGemm, GemmScatter
from commfuse_npu.proof.cases import Case
from commfuse_npu.proof.verify import counter_examples

QUESTION: dict[str, Any] = {"machine": ["here"], "group": [0, 1], "npu": None}
ENTRY = {"question": QUESTION, "answer": "plain"}
TAPERED = "shifted, 1 lanes, 2 chunks, tapered by 1.5"
CHOICES = {str(choice or "plain") for choice in (None, *candidates(Schedule(), 2, 1024))}


# ------------------------------------------------------------- what is tried


@pytest.mark.parametrize("schedule", [Schedule(lanes=3), Schedule("two_level", 3, node_size=2)])
def test_all_are_plans_that_hold_within_the_lanes_that_there_are(schedule: Schedule) -> None:
    schedules = candidates(schedule, 4, 1024)
    assert len(schedules) == len(set(map(str, schedules))) > 3
    for candidate in schedules:
        assert candidate.lanes <= schedule.lanes
        assert candidate.node_size == schedule.node_size
        assert candidate.shape in (schedule.shape, "collective")
        for rule in (GatherGemm(7, 2, 3), GemmScatter(2, 3, 7)):
            programs = Case(rule, candidate, 4).programs()
            assert not counter_examples(programs)


def test_the_simplest_comes_first_and_small_blocks_are_not_cut() -> None:
    first = candidates(Schedule(lanes=8), 4, 1024)[0]
    assert (first.lanes, first.chunks) == (3, 1)
    assert [candidate.chunks for candidate in candidates(Schedule(), 2, 31)] == [1]
    assert {candidate.chunks for candidate in candidates(Schedule(lanes=1), 8, 64)} == {1, 2, 3, 4}


# ---------------------------------------------------------- which is fastest


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20))
def test_the_fastest_wins_or_a_simpler_one_that_is_as_fast(seconds: list[float]) -> None:
    slow = iter([100.0])  # the first round, which does not count

    def run(order: Sequence[str]) -> list[float]:
        factor = next(slow, 1.0)
        return [seconds[int(choice)] * factor for choice in order]

    chosen, medians = fastest([*map(str, range(len(seconds)))], run, "0")
    best = min(seconds)
    assert medians[chosen] == seconds[int(chosen)] <= best * 1.005
    assert all(earlier > best * 1.005 for earlier in seconds[: int(chosen)])


def test_the_slower_half_is_not_run_again() -> None:
    orders: list[list[str]] = []
    seconds = dict(zip("abcdefgh", [5.0, 1.0, 4.0, 2.0, 3.0, 7.0, 6.0, 8.0], strict=True))

    def run(order: Sequence[str]) -> list[float]:
        orders.append([*order])
        return [seconds[choice] for choice in order]

    assert fastest([*seconds], run, "h") == ("b", {"b": 1.0, "d": 2.0, "e": 3.0, "h": 8.0})
    assert ["".join(sorted(order)) for order in orders] == [
        *["abcdefgh"] * 2,
        "bcdeh",
        *["bdeh"] * 4,
    ]
    assert len(set(map(tuple, orders[3:]))) > 1, "shuffled"


def test_what_is_usual_is_not_overruled_by_less_than_the_spread() -> None:
    noise = iter([0.0, 0.3, -0.3, 0.2, -0.2, 0.1] * 20)
    seconds = {"usual": 1.1, "other": 1.0}
    noisy = lambda order: [seconds[choice] + next(noise) for choice in order]  # noqa: E731
    assert fastest([*seconds], noisy, "usual")[0] == "usual"
    assert fastest([*seconds], lambda order: [*map(seconds.get, order)], "usual")[0] == "other"


# ------------------------------------------------------------ answers on disk


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b"[1, 2]", "TypeError"),
        (json.dumps({**ENTRY, "question": {**QUESTION, "group": [2]}}).encode(), "is another"),
        (json.dumps({**ENTRY, "answer": TAPERED}).encode(), f"answer, {TAPERED!r}, is another"),
        (json.dumps({"question": QUESTION}).encode(), "KeyError"),
    ],
)
def test_a_tuning_file_with_other_content_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, why: str
) -> None:
    file = tmp_path / "a folder, ünmade" / "answer.json"
    for answer in sorted(CHOICES):
        assert tuning.remembered(file, QUESTION, ()) is None
        tuning.remember(file, {**ENTRY, "answer": answer})
        assert tuning.remembered(file, QUESTION, CHOICES) == answer
    assert [*file.parent.iterdir()] == [file], "nothing half-written is left"
    file.write_bytes(content)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert tuning.remembered(file, QUESTION, CHOICES) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(file) in line
    assert why in line


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        tuning.remember(tmp_path / "file" / "answer.json", ENTRY)
    assert "is not remembered" in caplog.text


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuning.default_folder() == Path.home() / ".cache" / "commfuse_npu"
