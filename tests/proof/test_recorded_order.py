"""Files that are no order log, or no whole one: an answer, and exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.tools import cli

HEADER = {"order_log": 1, "rank": 0, "size": 1}
TRANSPORT = {"transport": 0, "ranks": [0], "lanes": 2, "batched": False}
SCHEDULE = {"shape": "shifted", "lanes": 2, "chunks": 1}
TAPERED = {"chunks": 2000, "taper": 8.0}  # shares that no number can hold
OPERATION: dict[str, Any] = {
    "operation": 0,
    "transport": 0,
    "name": "op",
    "kind": "gather",
    "own": "first",
    "rank": 0,
    "size": 1,
    "schedule": SCHEDULE,
    "block": [4, 4],
    "dtype": "torch.float32",
    "options": "None",
}
MESSAGE: dict[str, Any] = {
    "message": 0,
    "step": 0,
    "lane": 0,
    "source": 0,
    "target": 1,
    "piece": [0, None, 0],
    "elements": 16,
    "dtype": "torch.float32",
}
GROUP = {**TRANSPORT, "ranks": [0, 1]}
OF_TWO = {**OPERATION, "size": 2}


def write(folder: Path, *lines: Any, rank: int = 0) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path = folder / f"rank_{rank:05d}.jsonl"
    path.write_text(text)
    return path


def answer(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["verify", "--log", str(path)]) == 2
    captured = capsys.readouterr()
    return captured.err + captured.out


def test_a_rank_alone(tmp_path, capsys) -> None:
    whole = [HEADER, TRANSPORT, OPERATION, ["start", 0, 0], ["finish", 0], ["close", 0], ["end"]]
    write(tmp_path, *whole)
    assert cli.main(["verify", "--log", str(tmp_path)]) == 0
    assert "proved: 1 ranks, 1 operations" in capsys.readouterr().out
    write(tmp_path, *whole[:-3])
    assert "the file of rank 0 ends before its process did" in answer(tmp_path, capsys)
    write(tmp_path, HEADER, TRANSPORT, ["end"])
    assert "recorded no operation: there is nothing to prove" in answer(tmp_path, capsys)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds no line"),
        (["{"], "line 1: '{' is not JSON"),
        (["[" * 100_000], "line 1: .* is not JSON"),
        (["\x00\x01"], "is not JSON"),
        ([{"order_log": 7, "rank": 0, "size": 1}], "version 7, this reads 1; use the version"),
        ([[1]], "does not begin with the line of an order log"),
        ([{**HEADER, "rank": 5}], "rank is 5, not a whole number from 0 to 0"),
        ([{**HEADER, "rank": True}], "rank is True, not a whole number"),
        ([{**HEADER, "size": 10**9}], "size is 1000000000, not a whole number from 1 to 65536"),
        ([HEADER, "nonsense"], "line 2: 'nonsense' is not JSON"),
        ([HEADER, "9" * 5000], "line 2: .* is not JSON"),
        ([HEADER, {"else": 1}], "line 2: it defines nothing"),
        ([HEADER, ["dance", 1]], "line 2: .* is no event"),
        ([HEADER, ["start", 1]], "line 2: .* is no event"),
        ([HEADER, ["start", 0, 0]], "line 2: operation 0 is not defined"),
        ([HEADER, ["meet", 0, "x"]], "transport 0 is not defined"),
        ([HEADER, {**TRANSPORT, "ranks": [1]}], r"ranks is \[1\], which it cannot be"),
        ([HEADER, {**TRANSPORT, "ranks": [0, 0]}], "cannot be rank 0's"),
        ([HEADER, {**TRANSPORT, "batched": 1}], "batched is 1, not true or false"),
        ([HEADER, TRANSPORT, {**OPERATION, "size": 2}], "the plan is of rank 0 of 2"),
        ([HEADER, TRANSPORT, {**OPERATION, "schedule": {"lanes": 0}}], "lanes is 0"),
        ([HEADER, TRANSPORT, {**OPERATION, "schedule": {"a": 0}}], "no plan can be made"),
        ([HEADER, TRANSPORT, {**OPERATION, "schedule": 3}], "schedule is 3, not its options"),
        (
            [HEADER, TRANSPORT, {**OPERATION, "schedule": {"chunks": 10**12}}],
            "more than 1000000 transfers",
        ),
        (
            [HEADER, TRANSPORT, {**OPERATION, "schedule": TAPERED, "block": [9999]}],
            "no plan can be made",
        ),
        ([HEADER, TRANSPORT, {**OPERATION, "kind": "dance"}], "kind 'dance' is unknown"),
        ([HEADER, TRANSPORT, {**OPERATION, "block": []}], "the block has no dimension"),
        ([HEADER, TRANSPORT, {**OPERATION, "block": [1.5]}], r"block is \[1.5\]"),
        ([HEADER, '{"transport": NaN}'], "transport is nan"),
        ([HEADER, {**MESSAGE, "elements": -1}], "elements is -1"),
        ([HEADER, {**MESSAGE, "piece": [0]}], "which has not three parts"),
        (
            [HEADER, TRANSPORT, OPERATION, ["start", 0, 0], ["start", 0, 0]],
            "line 5: slot 0 is in use",
        ),
        ([HEADER, TRANSPORT, ["finish", 3]], "nothing is under way in slot 3"),
        ([HEADER, TRANSPORT, OPERATION, ["start", 0, 0], ["forget"]], "are forgotten while"),
        ([HEADER, ["end"], ["end"]], "line 3: a line after the end"),
        ([HEADER, TRANSPORT, MESSAGE, ["send", 0, 0]], "send in slot 0, which is free"),
        (
            [HEADER, TRANSPORT, OPERATION, MESSAGE, ["start", 0, 0], ["send", 0, 0]],
            "has place 0 of 1 in its group and no part in",
        ),
        ([HEADER, "x" * (2 << 20)], "it is longer than 1048576 bytes"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, capsys, lines, words: str) -> None:
    write(tmp_path, *lines)
    found = answer(tmp_path, capsys)
    assert re.search(words, found), found
    assert len(found) < 2000
    assert "Traceback" not in found


def test_files_that_do_not_belong_together(tmp_path, capsys) -> None:
    assert "holds no rank_*.jsonl; give the folder" in answer(tmp_path, capsys)
    assert "cannot read" in answer(tmp_path / "gone.jsonl", capsys)
    write(tmp_path, {**HEADER, "size": 3})
    assert "the job had 3 ranks, and the files of ranks 1, 2 are missing" in answer(
        tmp_path, capsys
    )
    write(tmp_path, {**HEADER, "size": 3}, rank=1)
    assert "there are 2 files of rank 0" in answer(tmp_path, capsys)
    write(tmp_path, {**HEADER, "rank": 1, "size": 2}, rank=1)
    assert "is of a job of 3 ranks" in answer(tmp_path, capsys)


def test_a_rank_without_the_transport_of_another(tmp_path, capsys) -> None:
    header = {**HEADER, "size": 2}
    write(tmp_path, header, GROUP, OF_TWO, ["start", 0, 0], ["end"])
    write(tmp_path, {**header, "rank": 1}, ["end"], rank=1)
    assert cli.main(["verify", "--log", str(tmp_path)]) == 1
    assert "rank 1 has no transport 0 of ranks 0, 1, which rank 0 has" in capsys.readouterr().out


def test_folders_with_spaces_and_other_letters(tmp_path, capsys) -> None:
    folder = tmp_path / "ein Ordner, 目录"
    folder.mkdir()
    write(folder, HEADER, TRANSPORT, OPERATION, ["start", 0, 0], ["finish", 0], ["end"])
    assert cli.main(["verify", "--log", str(folder)]) == 0


def gather_of(rank: int, transport: int = 0) -> list[dict[str, Any]]:
    """The definitions of a gather of two ranks: operation 2t, its messages 2t and 2t + 1."""
    plan = Schedule(**SCHEDULE).plan("gather", rank, 2)
    (step,) = plan.transfers
    assert step.send is not None
    assert step.receive is not None
    found = [{**OF_TWO, "rank": rank, "operation": 2 * transport, "transport": transport}]
    for number, transfer in enumerate((step.send, step.receive)):
        about = {**transfer._asdict(), "piece": list(transfer.piece)}
        found.append({**MESSAGE, **about, "message": 2 * transport + number})
    return found


def two_ranks(folder: Path, turns: int) -> None:
    """A gather of two ranks in batches, again and again."""
    once = [["start", 0, 0], ["batch", 0, 0, 1], ["wait", 0, 0], ["finish", 0]]
    for rank in range(2):
        header = {**HEADER, "rank": rank, "size": 2}
        group = {**GROUP, "batched": True}
        write(folder, header, group, *gather_of(rank), *once * turns, ["end"], rank=rank)


@pytest.mark.parametrize("threads", [False, True])
def test_threads_do_not_wait_for_each_other(tmp_path, capsys, threads: bool) -> None:
    """Rank 0 posts ``b`` after its wait for ``a``; rank 1 posts ``a`` after its wait for ``b``.

    In one thread that is a deadlock.  In two it is none.
    """
    a = [["start", 0, 0], ["batch", 0, 0, 1], ["wait", 0, 0]]
    b = [["start", 1, 2], ["batch", 1, 2, 3], ["wait", 1, 2]]
    switch = [["thread", 1]] if threads else []
    for rank, first, second in ((0, a, b), (1, b, a)):
        write(
            tmp_path,
            {**HEADER, "rank": rank, "size": 2},
            {**GROUP, "batched": True},
            {**GROUP, "batched": True, "transport": 1},
            *gather_of(rank, 0),
            *gather_of(rank, 1),
            *first,
            *switch,
            *second,
            ["finish", 0],
            ["finish", 1],
            ["end"],
            rank=rank,
        )
    assert cli.main(["verify", "--log", str(tmp_path)]) == (0 if threads else 1)
    out = capsys.readouterr().out
    if not threads:
        assert "deadlock (warm): rank 0 waits on lane 0 to send block 0 chunk 0" in out
        assert "and so round to rank 0" in out


def test_a_deadlock_is_one_though_the_files_just_end(tmp_path, capsys) -> None:
    """Both ranks were killed in their waits for each other."""
    a = [["start", 0, 0], ["batch", 0, 0, 1]]
    b = [["start", 1, 2], ["batch", 1, 2, 3]]
    for rank, first, wait in ((0, a, ["wait", 0, 0]), (1, b, ["wait", 1, 2])):
        header = {**HEADER, "rank": rank, "size": 2}
        groups = [{**GROUP, "batched": True, "transport": number} for number in range(2)]
        defined = [line for number in range(2) for line in gather_of(rank, number)]
        write(tmp_path, header, *groups, *defined, *first, wait, rank=rank)
    assert cli.main(["verify", "--log", str(tmp_path)]) == 1
    assert "and so round to rank 0" in capsys.readouterr().out
    # A rank that was neither in a wait nor in a post may have gone on.
    path = tmp_path / "rank_00001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    assert cli.main(["verify", "--log", str(tmp_path)]) == 2
    assert "and nothing more is known of rank 1" in capsys.readouterr().out


def test_what_repeats_itself_is_judged_once(tmp_path, monkeypatch, capsys) -> None:
    from commfuse_npu.proof import verify_log

    judged = []
    real = verify_log._Piece

    def counted(*args: Any) -> Any:
        judged.append(1)
        return real(*args)

    monkeypatch.setattr(verify_log, "_Piece", counted)
    two_ranks(tmp_path, 500)
    assert cli.main(["verify", "--log", str(tmp_path)]) == 0
    assert "2 ranks, 1000 operations, 2000 posts" in capsys.readouterr().out
    assert len(judged) == 2  # the operation, and what comes after the last one


def test_a_fault_in_one_of_many_repetitions_is_found(tmp_path, capsys) -> None:
    two_ranks(tmp_path, 500)
    path = tmp_path / "rank_00001.jsonl"
    lines = path.read_text().splitlines()
    waits = [place for place, line in enumerate(lines) if "wait" in line]
    del lines[waits[300]]
    path.write_text("\n".join(lines) + "\n")
    assert cli.main(["verify", "--log", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "rank 1, operation 300 (op) of the group of ranks 0, 1: it never waits for" in out
