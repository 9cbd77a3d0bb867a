"""Files that are no order log, or no whole one: an answer, and exit code 2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Post, Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import RULES
from commfuse_npu.plan.schedule import Place
from commfuse_npu.proof import verify_log
from commfuse_npu.runtime.order_log import Entry, OrderLog
from commfuse_npu.tools import cli

HEADER = {"order_log": 3, "rank": 0, "size": 1}
TRANSPORT = {"transport": 0, "ranks": [0], "lanes": 2, "batched": True}
SCHEDULE = {"shape": "shifted", "lanes": 2, "chunks": 1}
TAPERED = {"chunks": 2000, "taper": 8.0}  # shares that no number can hold
PROGRAM: dict[str, Any] = {
    "program": 0,
    "transport": 0,
    "name": "op",
    "rule": "bucket_gather",
    "schedule": SCHEDULE,
    "arguments": [4, False],
    "dtype": "torch.float32",
    "sum_dtype": "None",
    "options": "()",
}
GROUP = {**TRANSPORT, "ranks": [0, 1]}
ONCE = [["begin", 0, 0], ["at", 0, 0], ["at", 0, 2], ["finish", 0]]
"""The program among two ranks: a batch, its mark, a wait."""
COLLECTIVE: dict[str, Any] = {
    "collective": 0,
    "transport": 0,
    "name": "gather of chunk 0",
    "kind": "all_gather",
    "bytes": 64,
    "dtype": "torch.float32",
}


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
    whole = [HEADER, TRANSPORT, PROGRAM, ["begin", 0, 0], ["finish", 0], ["close", 0], ["end"]]
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
        (["{"], r"line 1: not JSON, .*: '{"),
        (["[" * 100_000], "line 1: not JSON"),
        (["\x00\x01"], "line 1: not JSON"),
        ([{"order_log": 7, "rank": 0, "size": 1}], "version 7, this reads 3; use the version"),
        ([[1]], "does not begin with the line of an order log"),
        ([{**HEADER, "rank": 5}], "line 1: there is no rank 5 of 1"),
        ([{**HEADER, "rank": True}], "rank is True, not of type int"),
        ([{**HEADER, "size": 10**9}], "there is no rank 0 of 1000000000"),
        ([HEADER, "nonsense"], "line 2: not JSON, .*'nonsense"),
        ([HEADER, "9" * 5000], "line 2: not JSON"),
        ([HEADER, {"else": 1}], "line 2: transport is None, not of type int"),
        ([HEADER, ["dance", 1]], "line 2: .* is no event"),
        ([HEADER, [["dance"], 1]], "line 2: .* is no event"),
        ([HEADER, 3], "line 2: 3 is no event"),
        ([HEADER, ["begin", 1]], "line 2: .* is no event"),
        ([HEADER, ["finish", -1]], "line 2: .* is no event"),
        ([HEADER, ["rows", 1]], "line 2: .* is no event"),
        ([HEADER, ["meet", 1, 1]], "line 2: .* is no event"),
        ([HEADER, ["begin", 0, 0]], "line 2: program 0 is not defined"),
        ([HEADER, ["meet", 0, "x"]], "transport 0 is not defined"),
        ([HEADER, {**TRANSPORT, "ranks": [1]}], r"of ranks \[1\] cannot be rank 0's"),
        ([HEADER, {**TRANSPORT, "ranks": [0, 0]}], "cannot be rank 0's"),
        ([HEADER, {**TRANSPORT, "ranks": [0, []]}], "cannot be rank 0's"),
        ([HEADER, TRANSPORT, TRANSPORT], "line 3: transport 0 of ranks .* cannot be rank 0's"),
        ([HEADER, {**TRANSPORT, "batched": 1}], "batched is 1, not of type bool"),
        ([HEADER, '{"transport": NaN}'], "transport is nan"),
        ([HEADER, PROGRAM], "line 2: transport 0 is not defined"),
        ([HEADER, TRANSPORT, PROGRAM, PROGRAM], "line 4: program 0 is defined already"),
        ([HEADER, TRANSPORT, {**PROGRAM, "rule": "dance"}], "no dance .KeyError"),
        ([HEADER, TRANSPORT, {**PROGRAM, "rule": ["a"]}], "rule is .'a'., not of type str"),
        ([HEADER, TRANSPORT, {**PROGRAM, "schedule": 3}], "schedule is 3, not of type dict"),
        ([HEADER, TRANSPORT, {**PROGRAM, "schedule": {"lanes": 0}}], "lanes is 0"),
        ([HEADER, TRANSPORT, {**PROGRAM, "schedule": {"a": 0}}], "no bucket_gather .TypeError"),
        ([HEADER, TRANSPORT, {**PROGRAM, "arguments": [4]}], "no bucket_gather .TypeError"),
        ([HEADER, TRANSPORT, {**PROGRAM, "arguments": [{}, 1]}], "no bucket_gather .TypeError"),
        ([HEADER, TRANSPORT, {**PROGRAM, "arguments": ["x" * 9999, 1]}], "no bucket_gather .Type"),
        (
            [HEADER, TRANSPORT, {**PROGRAM, "schedule": {"chunks": 10**12}}],
            "chunks is 1000000000000; at most 256",
        ),
        (
            [HEADER, TRANSPORT, {**PROGRAM, "schedule": TAPERED, "arguments": [9999, False]}],
            "chunks is 2000; at most 256",
        ),
        (
            [HEADER, TRANSPORT, PROGRAM, ["begin", 0, 0], ["begin", 0, 0]],
            "line 5: slot 0 is in use",
        ),
        ([HEADER, TRANSPORT, ["finish", 3]], "line 3: nothing is under way in slot 3"),
        ([HEADER, TRANSPORT, ["at", 3, 0]], "line 3: nothing is under way in slot 3"),
        ([HEADER, TRANSPORT, PROGRAM, ["begin", 0, 0], ["forget"]], "are forgotten while"),
        ([HEADER, TRANSPORT, PROGRAM, ["forget"], ["begin", 0, 0]], "program 0 is not defined"),
        ([HEADER, TRANSPORT, ["issue", 0, 0]], "line 3: collective 0 is not defined"),
        ([HEADER, TRANSPORT, PROGRAM, ["issue", 0, 0]], "line 4: collective 0 is not defined"),
        ([HEADER, COLLECTIVE], "line 2: transport 0 is not defined"),
        ([HEADER, TRANSPORT, {**COLLECTIVE, "bytes": "64"}], "bytes is '64', not of type int"),
        ([HEADER, TRANSPORT, PROGRAM, COLLECTIVE], "line 4: collective 0 is defined already"),
        (
            [HEADER, TRANSPORT, ["await", 0]],
            "line 3: nothing is under way in slot 0 that can await",
        ),
        (
            [HEADER, TRANSPORT, COLLECTIVE, ["issue", 0, 0], ["finish", 0]],
            "line 5: nothing is under way in slot 0 that can finish",
        ),
        ([HEADER, ["end"], ["end"]], "line 3: a line after the end"),
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
    assert "of a job of 3 ranks, among them none of rank 1, none of rank 2; give" in answer(
        tmp_path, capsys
    )
    write(tmp_path, {**HEADER, "size": 3}, rank=1)
    assert "among them 2 of rank 0, none of rank 1" in answer(tmp_path, capsys)
    write(tmp_path, {**HEADER, "rank": 1, "size": 2}, rank=1)
    assert "files of a job of 2 and one of 3 ranks" in answer(tmp_path, capsys)


def test_a_rank_without_the_transport_of_another(tmp_path, capsys) -> None:
    header = {**HEADER, "size": 2}
    write(tmp_path, header, GROUP, PROGRAM, ["begin", 0, 0], ["end"])
    write(tmp_path, {**header, "rank": 1}, ["end"], rank=1)
    assert cli.main(["verify", "--log", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "rank 1 lacks operation 0 (op) of the group of ranks 0, 1, which rank 0 has" in out


def test_folders_with_spaces_and_other_letters(tmp_path, capsys) -> None:
    folder = tmp_path / "ein Ordner, 目录"
    folder.mkdir()
    write(folder, HEADER, TRANSPORT, PROGRAM, ["begin", 0, 0], ["finish", 0], ["end"])
    assert cli.main(["verify", "--log", str(folder)]) == 0


def two_ranks(folder: Path, turns: int) -> None:
    """A gather of two ranks in batches, again and again."""
    for rank in range(2):
        header = {**HEADER, "rank": rank, "size": 2}
        write(folder, header, GROUP, PROGRAM, *ONCE * turns, ["end"], rank=rank)


@pytest.mark.parametrize("threads", [False, True])
def test_threads_do_not_wait_for_each_other(tmp_path, capsys, threads: bool) -> None:
    """Rank 0 posts ``b`` after its wait for ``a``; rank 1 posts ``a`` after its wait for ``b``.

    In one thread that is a deadlock.  In two it is none.
    """
    a, b = ([["begin", n, n], ["at", n, 0], ["at", n, 2]] for n in range(2))
    switch = [["thread", 1]] if threads else []
    for rank, first, second in ((0, a, b), (1, b, a)):
        write(
            tmp_path,
            {**HEADER, "rank": rank, "size": 2},
            GROUP,
            {**GROUP, "transport": 1},
            PROGRAM,
            {**PROGRAM, "program": 1, "transport": 1},
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
        assert "deadlock (warm): rank 0 waits on lane 0 to send block 0 (4 rows)" in out
        assert "and so round to rank 0" in out


def test_a_deadlock_is_one_though_the_files_just_end(tmp_path, capsys) -> None:
    """Both ranks were killed in their waits for each other."""
    for rank in range(2):
        groups = [{**GROUP, "transport": number} for number in range(2)]
        programs = [{**PROGRAM, "program": number, "transport": number} for number in range(2)]
        lines = [["begin", 0, rank], ["at", 0, 0], ["at", 0, 2]]
        header = {**HEADER, "rank": rank, "size": 2}
        write(tmp_path, header, *groups, *programs, *lines, rank=rank)
    assert cli.main(["verify", "--log", str(tmp_path)]) == 1
    assert "and so round to rank 0" in capsys.readouterr().out
    # A rank that was neither in a wait nor in a post may have gone on.
    path = tmp_path / "rank_00001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    assert cli.main(["verify", "--log", str(tmp_path)]) == 2
    assert "and nothing more is known of rank 1" in capsys.readouterr().out


def test_what_repeats_itself_is_judged_once(tmp_path, monkeypatch, capsys) -> None:
    judged = []
    real = verify_log._Rank

    def counted(*args: Any) -> Any:
        judged.append(1)
        return real(*args)

    monkeypatch.setattr(verify_log, "_Rank", counted)
    two_ranks(tmp_path, 500)
    assert cli.main(["verify", "--log", str(tmp_path)]) == 0
    assert "2 ranks, 1000 operations, 2000 posts" in capsys.readouterr().out
    assert len(judged) == 2 * 2  # the operation, and what comes after the last one, by rank


def test_a_fault_in_one_of_many_repetitions_is_found(tmp_path, capsys) -> None:
    two_ranks(tmp_path, 500)
    path = tmp_path / "rank_00001.jsonl"
    lines = path.read_text().splitlines()
    waits = [place for place, line in enumerate(lines) if line == '["at", 0, 2]']
    del lines[waits[300]]
    path.write_text("\n".join(lines) + "\n")
    assert cli.main(["verify", "--log", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert (
        "rank 1, operation 300 (op) of the group of ranks 0, 1: it finishes where its program has "
        "'wait until received 0; sent 0'" in out
    )


# ---------------------------------------------------------------------- several under way at once


class Host:
    """Writes down what a rank would; a program goes on as far as it is told."""

    def __init__(self, folder: Path, rank: int, size: int, batched: bool) -> None:
        self.log = OrderLog(folder, rank, size)
        self._place = Place(Schedule(lanes=1), rank, size, batched)
        self._transport = self.log.transport(range(size), 1, batched)

    def begin(self, rule: str, *arguments: object) -> Begun:
        program = RULES[rule](self._place, *arguments)
        return Begun(program, self.log.program(self._transport, program, rule, "torch.float32"))

    def issue(self, kind: str, name: str, size: int = 64) -> Entry:
        return self.log.collective(self._transport, kind, name, size, "torch.float32")


class Begun:
    def __init__(self, program: Program, log: Entry) -> None:
        self._program, self._log, self._at = program, log, 0

    def _go_on(self, end: int) -> None:
        for at in range(self._at, end):
            if isinstance(self._program.code[at], Post | Wait):
                self._log("at", at)
        self._at = end

    def ahead(self) -> None:
        self._go_on(self._program.mark)

    def rows(self, *steps: int) -> None:
        self._log("rows", *steps)

    def finish(self) -> None:
        self._go_on(len(self._program.code))
        self._log("finish")


def run(folder: Path, batched: bool, *parts: Callable[[Host], None]) -> verify_log.Verdict:
    """The verdict on what each rank does, by rank."""
    for rank, part in enumerate(parts):
        host = Host(folder, rank, len(parts), batched)
        part(host)
        host.log.close()
    return verify_log.verify_logs([folder])


BUCKET = "bucket_scatter", 6, 1, 1  # with memory for one piece


def waits_late(host: Host) -> None:
    a, b = host.begin(*BUCKET), host.begin(*BUCKET)
    a.ahead()
    b.ahead()
    a.finish()
    b.finish()


def waits_late_in_line(host: Host) -> None:
    a, b = host.begin(*BUCKET), host.begin(*BUCKET)
    a.ahead()
    a.finish()
    b.ahead()
    b.finish()


def waits_early(host: Host) -> None:
    a = host.begin(*BUCKET)
    a.ahead()
    a.finish()
    b = host.begin(*BUCKET)
    b.ahead()
    b.finish()


def test_on_gloo_buckets_post_at_once_and_on_hccl_in_line(tmp_path, monkeypatch) -> None:
    found = run(tmp_path, False, waits_late, waits_early, waits_late)
    assert (found.faults, found.notes) == ([], [])
    # It is the line that keeps their batches in order.
    monkeypatch.setattr(verify_log, "_IN_LINE", set())
    found = run(tmp_path, False, waits_late, waits_early, waits_late)
    assert re.match(r"(deadlock|wrong data).*bucket_scatter", found.faults[0])


def test_a_bucket_that_overtakes_another_on_hccl(tmp_path) -> None:
    found = run(tmp_path, True, waits_late_in_line, waits_early, waits_late_in_line)
    assert (found.faults, found.notes) == ([], [])
    # Alike on all ranks it would not even hang.
    found = run(tmp_path, True, waits_late, waits_late, waits_late)
    assert len(found.faults) == 3
    assert re.search(
        "rank 0, operation 1 .*: it posts before an earlier bucket has posted all",
        found.faults[0],
    )


@pytest.mark.parametrize("batched", [False, True])
def test_a_bucket_that_is_finished_before_an_earlier_one(tmp_path, batched: bool) -> None:
    def wrong(host: Host) -> None:
        a, b = host.begin(*BUCKET), host.begin(*BUCKET)
        b.finish()
        a.finish()

    faults = run(tmp_path, batched, wrong, wrong, wrong).faults
    assert any(re.search("operation 1 .*: it posts before an earlier", one) for one in faults)


@pytest.mark.parametrize("batched", [False, True])
def test_rows_of_a_bucket_are_waited_for_out_of_order(tmp_path, batched: bool) -> None:
    def part(host: Host) -> None:
        gather = host.begin("bucket_gather", 6, False)
        gather.ahead()
        gather.rows(1)
        gather.finish()

    found = run(tmp_path, batched, part, part, part)
    assert (found.faults, found.notes) == ([], [])


@pytest.mark.parametrize("batched", [False, True])
def test_rows_that_a_waiting_rank_has_not_sent(tmp_path, batched: bool) -> None:
    """Both wait for what the other sends afterwards."""

    def part(host: Host) -> None:
        first, second = host.begin("bucket_gather", 6, False), host.begin("bucket_gather", 6, False)
        (first if host.log.path.name == "rank_00000.jsonl" else second).ahead()
        (first if host.log.path.name == "rank_00000.jsonl" else second).rows(0)
        first.finish()
        second.finish()

    found = run(tmp_path, batched, part, part)
    assert found.faults


def test_what_gloo_forgives_is_found(tmp_path) -> None:
    """A weight is fetched ahead of an operation on one rank, and behind it on the other."""

    def ahead(host: Host) -> None:
        weight, other = host.begin("sharded_forward", 8, 4), host.begin("gather_use", 8, 4, False)
        weight.ahead()
        other.finish()
        weight.finish()

    def behind(host: Host) -> None:
        weight, other = host.begin("sharded_forward", 8, 4), host.begin("gather_use", 8, 4, False)
        other.finish()
        weight.finish()

    assert run(tmp_path, False, ahead, ahead).faults == []
    (fault,) = run(tmp_path, False, ahead, behind).faults
    assert re.match(r"wrong data: rank . sends block . \(8 rows\) .* expects block .", fault)


# ---------------------------------------------------------------------- collectives of a group


def chunks(host: Host, *, size: int = 64, turns: int = 2) -> None:
    """Two of them under way at once, and an operation behind them."""
    for _ in range(turns):
        first = host.issue("all_gather", "gather of chunk 0")
        second = host.issue("reduce_scatter", "scatter of chunk 1", size)
        first("await")
        host.begin("gather_use", 8, 4, False).finish()
        second("await")


@pytest.mark.parametrize("batched", [False, True])
def test_collectives_of_a_group_are_proved(tmp_path, batched: bool) -> None:
    found = run(tmp_path, batched, chunks, chunks, chunks)
    assert (found.faults, found.notes) == ([], [])
    assert found.operations == 3 * 2 * 3


def in_another_order(host: Host) -> None:
    second = host.issue("reduce_scatter", "scatter of chunk 1")
    first = host.issue("all_gather", "gather of chunk 0")
    first("await")
    host.begin("gather_use", 8, 4, False).finish()
    second("await")
    chunks(host, turns=1)


def never_waited_for(host: Host) -> None:
    chunks(host)
    host.issue("all_gather", "gather of chunk 0")


def one_is_missing(host: Host) -> None:
    chunks(host, turns=1)
    host.issue("all_gather", "gather of chunk 0")("await")
    host.begin("gather_use", 8, 4, False).finish()


def waited_for_before_an_operation(host: Host) -> None:
    """Which the others finish before they begin the collective."""
    gather = host.issue("all_gather", "gather of chunk 0")
    gather("await")
    host.begin("gather_use", 8, 4, False).finish()


def begun_after_an_operation(host: Host) -> None:
    host.begin("gather_use", 8, 4, False).finish()
    host.issue("all_gather", "gather of chunk 0")("await")


@pytest.mark.parametrize(
    ("others", "wrong", "words"),
    [
        (chunks, in_another_order, r"same as collective 0 \(gather of chunk 0\) of .*: name gather "
         "of chunk 0 on rank 0, scatter of chunk 1 on rank 1; kind all_gather on rank 0, "),
        (chunks, in_another_order, r"wrong data: rank \d sends .* of collective 0 \("),
        (chunks, partial(chunks, size=32), r"same as collective 1 \(scatter of chunk 1\) of .*: "
         "bytes 64 on rank 0, 32 on rank 1"),
        (chunks, one_is_missing, r"rank 1 lacks collective 3 \(scatter of chunk 1\)"),
        (chunks, never_waited_for, r"rank 1, collective 4 \(gather of chunk 0\) of .*: it began it "
         "and never waited for it"),
        (begun_after_an_operation, waited_for_before_an_operation, "deadlock .*waits on lane "
         r"of collectives to \w+ all_gather \(64 bytes\) from rank \d .*round to rank"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("batched", [False, True])
def test_what_ranks_do_not_do_alike_is_named(
    tmp_path, batched: bool, others: Callable[[Host], None], wrong: Callable[[Host], None],
    words: str,
) -> None:  # fmt: skip
    faults = run(tmp_path, batched, others, wrong, others).faults
    assert any(re.search(words, fault) for fault in faults), faults


def test_a_run_on_gloo_is_played_with_batches_of_the_same_work() -> None:
    """Which needs the same sends, in the same order, in both programs of a rule."""
    schedule = Schedule(lanes=2, chunks=3)
    for rule, arguments in {
        "gather_gemm": (12, 4, 4, False, "blocks", 4),
        "gemm_scatter": (12, 4, 4),
        "column_backward": (12, 4, 4, True, True, True),
        "gemm_all_reduce": (36, 4, 4),
        "bucket_scatter": (12, 1, 2),
        "sharded_backward": (12, 4, True, True),
    }.items():
        single, batched = (RULES[rule](Place(schedule, 1, 3, way), *arguments) for way in (0, 1))
        assert [p.send.transfer for p in single.posts if p.send] == [
            p.send.transfer for p in batched.posts
        ]
