"""Order logs written by hand: invalid or incomplete logs, and logs that are proved or refuted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Post, Wait
from commfuse_npu.plan.rules import RULES
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.proof import verify_log
from commfuse_npu.runtime.order_log import VERSION, OrderLog
from commfuse_npu.tools import cli

HEADER = ["log", VERSION, 0, 1]
TRANSPORT = ["transport", 0, [0], True]
PROGRAM: dict[str, Any] = {
    "name": "op",
    "rule": "bucket_gather",
    "schedule": {"shape": "shifted", "lanes": 2, "chunks": 1},
    "arguments": [4],
    "dtype": "torch.float32",
    "sum_dtype": "None",
    "options": "()",
}
BEGIN, POST, WAIT, FINISH = ONCE = [
    ["begin", 0, 0, PROGRAM], ["at", 0, 0], ["at", 0, 2], ["finish", 0]
]  # fmt: skip
"""Events of the program on two ranks: a batch, its ``AheadEnd``, a wait."""


def write(folder: Path, *lines: Any, rank: int = 0) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path = folder / f"rank_{rank:05d}.jsonl"
    path.write_text(text)
    return path


@pytest.fixture
def judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``judged(code)``: the output of the command on the folder; asserts its exit code."""

    def of(code: int, path: Path = tmp_path) -> str:
        assert cli.main(["verify", "--log", str(path)]) == code
        captured = capsys.readouterr()
        return captured.err + captured.out

    return of


def test_files_that_are_whole_and_those_that_are_not(tmp_path, judged) -> None:
    assert "holds no rank_*.jsonl; give the folder" in judged(2)
    assert "cannot read" in judged(2, tmp_path / "gone.jsonl")
    folder = tmp_path / "ein Ordner, 目录"
    folder.mkdir()
    lines = [HEADER, TRANSPORT, BEGIN, ["finish", 0], ["close", 0], ["end"]]
    write(folder, *lines)
    assert "proved: 1 ranks, 1 operations" in judged(0, folder)
    write(tmp_path, *lines[:-3])
    assert "the file of rank 0 ends before its process did" in judged(2)
    write(tmp_path, HEADER, TRANSPORT, BEGIN, ["fail", 0, "rank 1 is gone"], ["end"])
    out = judged(2)
    assert "a transport of rank 0 broke: rank 1 is gone" in out
    assert "rank 0 came to its end with 1 operations under way" in out
    write(tmp_path, HEADER, TRANSPORT, ["end"])
    assert "recorded no operation: there is nothing to prove" in judged(2)
    write(tmp_path, ["log", VERSION, 0, 3])
    assert "jobs of 3 ranks, with none of rank 1, none of rank 2; give" in judged(2)
    write(tmp_path, ["log", VERSION, 0, 3], rank=1)
    assert "with 2 of rank 0, none of rank 1" in judged(2)
    write(tmp_path, ["log", VERSION, 1, 2], rank=1)
    assert "jobs of 2 and 3 ranks, with none of rank 2" in judged(2)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "does not begin with the line of an order log of version 4"),
        ([["log", 7, 0, 1]], "version 4 .log of version 7.; use the version of commfuse-npu that"),
        ([["log", VERSION, 2, 2]], "version 4 .rank 2 of 2.; use the version"),
        ([HEADER, "9" * 5000], "line 2: ValueError: Exceeds the limit"),
        ([HEADER, "[" * 100_000], "line 2: RecursionError: .*depth"),
        ([HEADER, ["transport", 0, [0, 1], True]], "line 2: .*rank 0 of 1 has no such group"),
        ([HEADER, ["transport", 0, [0, 0], True]], "line 2: .*rank 0 of 1 has no such group"),
        ([HEADER, ["thread", "main"]], "line 2: ValueError: this is no event"),
        ([HEADER, TRANSPORT, BEGIN, BEGIN], "line 4: ValueError: slot 0 is in use"),
        ([HEADER, TRANSPORT, ["issue", 0, 0, {"name": "all"}]], "line 3: KeyError: 'kind'"),
        ([HEADER, ["dance", 1]], "line 2: ValueError: this is no event: .*dance"),
        ([HEADER, BEGIN], "line 2: KeyError: 0"),
        ([HEADER, TRANSPORT, ["begin", 0, 0, {**PROGRAM, "schedule": {"lanes": 0}}]],
         "line 3: PlanError: lanes is 0; it must be"),
        ([HEADER, TRANSPORT, ["begin", 0, 0, {**PROGRAM, "arguments": [4, 1]}]], "TypeError: buck"),
        ([HEADER, TRANSPORT, ["at", 3, 0]], "line 3: .*nothing is under way in slot 3"),
        ([HEADER, TRANSPORT, BEGIN, ["await", 0]], "line 4: .*under way in slot 0 that can await"),
        ([HEADER, ["end"], ["end"]], "line 3: .*a line after the end"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused(tmp_path, judged, lines: list[Any], words: str) -> None:
    write(tmp_path, *lines)
    output = judged(2)
    assert re.search(words, output), output
    assert len(output) < 2000


# ----------------------------------------------------------------------------- two ranks


def two_ranks(folder: Path, *of_ranks: list[Any], whole: bool = True, changes: Any = None) -> None:
    """Two ranks with one program on each of two transports; ``changes`` apply to rank 1."""
    for rank, events in enumerate(of_ranks):
        groups = [["transport", number, [0, 1], True] for number in range(2)]
        others = (rank and changes) or {}
        lines = [
            [*event[:3], {**event[3], **others}] if event[0] == "begin" else event
            for event in events
        ]
        write(folder, ["log", VERSION, rank, 2], *groups, *lines, *[["end"]] * whole, rank=rank)


@pytest.mark.parametrize(
    ("events", "changes", "words"),
    [
        ([], {}, r"rank 1 lacks operation 0 \(op\) of the group of ranks 0, 1, which rank 0 has"),
        ([BEGIN, WAIT, POST, FINISH], {}, "is at 'wait .*' where its program has 'post"),
        ([BEGIN, ["at", 0, 9], FINISH], {}, "is at its end where its program has 'post "),
        ([BEGIN, POST, WAIT, WAIT, FINISH], {}, "is at 'wait .* where its program has "),
        (ONCE, {"arguments": [5]}, r"arguments \[4\] on rank 0, \[5\] on rank 1"),
        (ONCE, {"arguments": [5]}, "wrong data: rank . sends .* rows. .* expects .* rows."),
        (ONCE, {"schedule": {"lanes": 1}}, "schedule .*'lanes': 2.* on rank 0, .* on rank 1"),
        (ONCE, {"dtype": "torch.float64"}, "dtype .*32 on rank 0, .*64 on rank 1"),
        (ONCE, {"sum_dtype": "torch.float64"}, "sum_dtype .* on rank 0, .*64 on rank 1"),
        (ONCE, {"options": "?"}, r"options .* on rank 0, \? on rank 1"),
    ],
)
def test_what_rank_1_does_not_do_is_named(tmp_path, judged, events, changes, words: str) -> None:
    two_ranks(tmp_path, ONCE, ONCE)
    assert judged(0).startswith("proved: 2 ranks")
    two_ranks(tmp_path, ONCE, events, changes=changes)
    out = judged(1)
    assert out.startswith("refuted")
    assert re.search(words, out), out


@pytest.mark.parametrize("threads", [False, True])
def test_threads_do_not_wait_for_each_other(tmp_path, judged, threads: bool) -> None:
    """Rank 0 posts ``b`` after its wait for ``a``; rank 1 posts ``a`` after its wait for ``b``.

    This is a deadlock in one thread, but not in two.
    """
    a, b = ([["begin", n, n, PROGRAM], ["at", n, 0], ["at", n, 2]] for n in range(2))
    switch, ends = [["thread", 1]] * threads, [["finish", 0], ["finish", 1]]
    two_ranks(tmp_path, [*a, *switch, *b, *ends], [*b, *switch, *a, *ends])
    out = judged(0 if threads else 1)
    assert (
        threads
        or "deadlock (cold): rank 0 waits for rank 1 to open lane 0 between them for block 0 (4"
        in out
    )
    assert threads or "and so round to rank 0" in out
    # A thread goes on behind a point where nothing is in flight.
    before, back = [["thread", 1], *ONCE], [["thread", 0]] * threads
    first, second = [*a, *back, *b, *ends], [*b, *back, *a, *ends]
    two_ranks(tmp_path, [*before, *first], [*before, *second])
    judged(0 if threads else 1)
    # The same lines again, but now all in thread 0.
    two_ranks(tmp_path, [*before, *first * 2], [*before, *second * 2])
    judged(1)


def test_threads_post_in_the_order_of_the_log(tmp_path, judged) -> None:
    first, second, third = ([["begin", n, 0, PROGRAM], ["at", n, 0]] for n in range(3))
    ends = [event for n in range(3) for event in (["at", n, 2], ["finish", n])]
    threads = [*first, ["thread", 1], *second, ["thread", 0], *third, *ends]
    two_ranks(tmp_path, threads, [*first, *second, *third, *ends])
    judged(0)


def test_a_bucket_is_not_held_by_those_of_another_group(tmp_path, judged) -> None:
    events = [["begin", slot, slot, PROGRAM] for slot in range(2)]
    events += [[*event, at] for at in (0, 2) for event in (["at", 1], ["at", 0])]
    events += [["finish", 1], ["finish", 0]]
    two_ranks(tmp_path, events, events)
    judged(0)


def test_ranks_meet_at_the_same_places(tmp_path, judged) -> None:
    here, there = ([*ONCE, ["meet", 0, place]] for place in ("here", "there"))
    two_ranks(tmp_path, here, here)
    judged(0)
    two_ranks(tmp_path, here, there)
    assert "place here on rank 0, there on rank 1" in judged(1)
    two_ranks(tmp_path, here, ONCE)
    assert "rank 0 waits for rank 1 to come to here" in judged(1)


def test_a_deadlock_is_one_though_the_files_just_end(tmp_path, judged) -> None:
    """Both ranks were killed in their waits for each other."""
    first, second = ([["begin", 0, n, PROGRAM], ["at", 0, 0], ["at", 0, 2]] for n in range(2))
    two_ranks(tmp_path, first, second, whole=False)
    assert "and so round to rank 0" in judged(1)
    # A rank that was in neither a wait nor a post may have continued.
    two_ranks(tmp_path, first, second[:-2], whole=False)
    assert "and nothing more is known of rank 1" in judged(2)
    with (tmp_path / "rank_00001.jsonl").open("a") as file:
        file.write('["end"]\n')
    out = judged(1)
    assert "and rank 1 has nothing more to do" in out
    assert "rank 1 lacks operation 0 (op) of the group of ranks 0, 1, which rank 0 has" in out


def test_what_repeats_itself_is_judged_once(tmp_path, monkeypatch, judged) -> None:
    simulated, real = [], verify_log.Rendezvous
    monkeypatch.setattr(
        verify_log, "Rendezvous", lambda *args, **links: simulated.append(1) or real(*args, **links)
    )
    two_ranks(tmp_path, ONCE * 500, ONCE * 500)
    assert "2 ranks, 1000 operations, 2000 posts" in judged(0)
    assert len(simulated) == 3  # the first operation, the others, the end of the log
    # A fault in one of the repetitions is found.
    two_ranks(tmp_path, ONCE * 500, [*ONCE * 300, *ONCE[:2], ONCE[3], *ONCE * 199])
    words = "rank 1, operation 300 (op) of the group of ranks 0, 1: it finishes without"
    assert f"{words} 'wait until received 0; sent 0'" in judged(1)


def test_no_more_than_a_few_faults_are_told(tmp_path) -> None:
    events = [
        event for slot in range(10) for event in (["begin", slot, 0, PROGRAM], ["at", slot, 0])
    ]
    events += [["finish", slot] for slot in range(10)]
    two_ranks(tmp_path, events, events)
    assert len(verify_log.verify_logs([tmp_path]).faults) == 8


# ---------------------------------------------------------------------- several under way at once


def recorded(
    log: OrderLog, spec: RankSpec, transport: int, kind: str, *given: Any
) -> Iterator[None]:
    """Record a program of a rule, or a collective; yields once begun, and at its ``AheadEnd``."""
    if kind not in RULES:
        entry = log.collective(transport, kind, *given, "torch.float32")
        yield
        entry("await")
        return
    program = RULES[kind](spec, *given)
    entry = log.program(transport, program, kind, "torch.float32")
    yield
    for at, step in enumerate(program.code):
        if at == program.ahead_end:
            yield
        if isinstance(step, Post | Wait):
            entry("at", at)
    entry("finish")


def steps(*todo: tuple[str, str], turns: int = 1) -> list[tuple[tuple[int, str], str]]:
    """Steps ``(operation, how far)`` of a rank: ``begin``, ``ahead`` or ``finish``."""
    return [((turn, name), upto) for turn in range(turns) for name, upto in todo]


def run(folder: Path, batched: bool, *parts: list[tuple[Any, ...]]) -> verify_log.Verdict:
    """Record the steps of each rank and return the verdict on the logs."""
    size = len(parts)
    for rank, part in enumerate(parts):
        log, spec = OrderLog(folder, rank, size), RankSpec(Schedule(lanes=1), rank, size, batched)
        transport, begun = log.transport(range(size), batched), {}
        for operation, upto in part:
            if operation not in begun:
                begun[operation] = recorded(log, spec, transport, *KINDS[operation[1]])
                next(begun[operation])
            if upto == "ahead":
                next(begun[operation])
            elif upto == "finish":
                list(begun[operation])
        log.close()
    return verify_log.verify_logs([folder])


KINDS: dict[str, tuple[Any, ...]] = {
    "a": ("bucket_scatter", 6, 1, 1),  # memory for one piece
    "b": ("bucket_scatter", 6, 1, 1),
    "gather": ("bucket_gather", 6),
    "second": ("bucket_gather", 6),
    "column": ("column_backward", 8, 4, 4, True, True),
    "use": ("gather_use", 8, 4, False),
    "all-gather": ("all_gather", "gather of chunk 0", 64),
    "reduce-scatter": ("reduce_scatter", "scatter of chunk 1", 64),
    "smaller": ("reduce_scatter", "scatter of chunk 1", 32),
}
A_BEGUN, B_BEGUN = ("a", "ahead"), ("b", "ahead")
A_ENDS, B_ENDS = ("a", "finish"), ("b", "finish")
LATE = steps(A_BEGUN, B_BEGUN, A_ENDS, B_ENDS)
IN_LINE = steps(A_BEGUN, ("b", "begin"), A_ENDS, B_BEGUN, B_ENDS)
EARLY = steps(A_BEGUN, A_ENDS, B_BEGUN, B_ENDS)
LATE_USE, EARLY_USE = ([*part[:3], *steps(("use", "finish")), part[3]] for part in (LATE, EARLY))
WRONG = steps(("a", "begin"), B_ENDS, A_ENDS)
AWAITED = [
    steps(("gather", "begin"), ("second", "begin"), (first, "finish"), (last, "finish"))
    for first, last in (("gather", "second"), ("second", "gather"))
]
AHEAD = steps(("column", "ahead"), ("use", "finish"), ("column", "finish"))
BEHIND = steps(("column", "begin"), ("use", "finish"), ("column", "finish"))


def together(first: str, second: str) -> tuple[tuple[Any, ...], ...]:
    """Two concurrent collectives, and an operation after them."""
    return (
        (first, "begin"), (second, "begin"), ("all-gather", "finish"), ("use", "finish"),
        (second if first == "all-gather" else first, "finish"),
    )  # fmt: skip


CHUNKS = steps(*together("all-gather", "reduce-scatter"), turns=2)
REVERSED = steps(*together("reduce-scatter", "all-gather"), turns=2)
SMALLER = steps(*together("all-gather", "smaller"), turns=2)
MISSING = [step for step in CHUNKS if step[0] != (1, "reduce-scatter")]
NEVER_AWAITED = [*CHUNKS, ((2, "all-gather"), "begin")]
BEFORE = steps(("all-gather", "finish"), ("use", "finish"))
AFTER = steps(("use", "finish"), ("all-gather", "finish"))
BOTH = (False, True)


@pytest.mark.parametrize(
    ("batched", "parts", "operations"),
    [
        # On gloo buckets post immediately, on HCCL one after the other.
        (False, (LATE, EARLY, LATE), 6),
        (False, (LATE_USE, EARLY_USE, LATE_USE), 9),
        (True, (IN_LINE, EARLY, IN_LINE), 6),
        (False, (AHEAD, AHEAD), 4),
        *((batched, (CHUNKS,) * 3, 18) for batched in BOTH),
    ],
)
def test_runs_are_proved(tmp_path, batched: bool, parts: Any, operations: int) -> None:
    verdict = run(tmp_path, batched, *parts)
    assert (verdict.faults, verdict.notes, verdict.operations) == ([], [], operations)


@pytest.mark.parametrize(
    ("ways", "parts", "words"),
    [
        # The same on all ranks, so it would not hang.
        ((True,), (LATE,) * 3, "rank 0, operation 1 .*: it posts before an earlier bucket has"),
        (BOTH, (WRONG,) * 3, "operation 1 .*: it posts before an earlier"),
        # Each rank waits for data that the other sends later.
        (BOTH, AWAITED, "deadlock|wrong data|it waits"),
        # A weight is gathered before an operation on one rank and after it on the other, which gloo
        # tolerates.
        ((False,), (AHEAD, BEHIND), r"wrong data: rank . sends block . \(8 rows\) .* expects blo"),
        (BOTH, (CHUNKS, REVERSED, CHUNKS), r"same as collective 0 \(gather of chunk 0\) of .*: "
         "name gather of chunk 0 on rank 0, scatter of chunk 1 on rank 1; kind all_gather on"),
        (BOTH, (CHUNKS, REVERSED, CHUNKS), r"wrong data: rank \d sends .* of collective 0 \("),
        (BOTH, (CHUNKS, SMALLER, CHUNKS), r"same as collective 1 \(scatter of chunk 1\) of .*: "
         "bytes 64 on rank 0, 32 on rank 1"),
        (BOTH, (CHUNKS, MISSING, CHUNKS), r"rank 1 lacks collective 3 \(scatter of chunk 1\)"),
        (BOTH, (CHUNKS, NEVER_AWAITED, CHUNKS), r"rank 1, collective 4 \(gather of chunk 0\) of .*"
         ": it began it and never waited for it"),
        (BOTH, (AFTER, BEFORE, AFTER), "deadlock .*(open|waits on) lane of collectives .*"
         r"all_gather \(64 bytes\) from rank \d .*round to rank"),
    ],
)  # fmt: skip
def test_what_ranks_do_not_do_alike_is_named(tmp_path, ways: Any, parts: Any, words: str) -> None:
    for batched in ways:
        folder = tmp_path / str(batched)
        faults = run(folder, batched, *parts).faults
        assert any(re.search(words, fault) for fault in faults), (batched, faults)
