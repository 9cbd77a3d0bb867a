"""Order logs written by hand: invalid or incomplete logs, and logs that are proved or refuted."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Post, Wait
from commfuse_npu.plan.rules import BucketGather, BucketScatter, ColumnBackward, GatherUse, Rule
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.runtime.order_log import VERSION
from commfuse_npu.tools import cli
from commfuse_npu.tools.order_log import verify_log

Events = list[Any]

PROGRAM: dict[str, Any] = {
    "name": "op",
    "rule": "BucketGather",
    "schedule": {"shape": "shifted", "lanes": 2, "chunks": 1},
    "arguments": [4],
    "dtype": "torch.float32",
    "sum_dtype": "None",
    "options": "()",
}


def begin(slot: int = 0, transport: int = 0, **changes: Any) -> Events:
    return ["begin", slot, transport, {**PROGRAM, **changes}]


BEGIN, POST, WAIT, FINISH = ONCE = [begin(), ["at", 0, 0], ["at", 0, 2], ["finish", 0]]
"""Events of the program on two ranks: a batch, its ``AheadEnd``, a wait."""

HEADER = ["log", VERSION, 0, 1]
TRANSPORT = ["transport", 0, [0]]
END = ["end"]


def write(folder: Path, *lines: Any, rank: int = 0) -> None:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    folder.mkdir(exist_ok=True)
    (folder / f"rank_{rank:05d}.jsonl").write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ein Ordner, 目录"


@pytest.fixture
def judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``judged(code, words)``: the output of the command; asserts its exit code and words."""

    def of(code: int, words: str, path: Path = folder) -> str:
        assert cli.main(["verify", "--log", str(path)]) == code
        captured = capsys.readouterr()
        output = captured.err + captured.out
        assert re.search(words, output, re.DOTALL), output
        assert len(output) < 3000
        return output

    return of


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], f"does not begin with the line of an order log of version {VERSION}"),
        ([["log", 9, 0, 1]], f"version {VERSION} .log of version 9.; use the version of"),
        ([["log", VERSION, 2, 2]], f"version {VERSION} .rank 2 of 2.; use the version"),
        ([HEADER, "9" * 5000], "line 2: ValueError: Exceeds the limit"),
        ([HEADER, "[" * 100_000], "line 2: RecursionError: .*depth"),
        ([HEADER, ["transport", 0, [0, 1]]], "line 2: .*rank 0 of 1 has no such group"),
        ([HEADER, ["transport", 0, [0, 0]]], "line 2: .*rank 0 of 1 has no such group"),
        ([HEADER, ["thread", "main"]], "line 2: ValueError: this is no event"),
        ([HEADER, TRANSPORT, BEGIN, BEGIN], "line 4: ValueError: slot 0 is in use"),
        ([HEADER, TRANSPORT, ["issue", 0, 0, {"name": "all"}]], "line 3: KeyError: 'kind'"),
        ([HEADER, BEGIN], "line 2: KeyError: 0"),
        ([HEADER, TRANSPORT, begin(schedule={"lanes": 0})], "line 3: PlanError: lanes is 0; it mu"),
        ([HEADER, TRANSPORT, begin(arguments=[4, 1])], "TypeError: BucketGather"),
        ([HEADER, TRANSPORT, ["at", 3, 0]], "line 3: .*nothing is under way in slot 3"),
        ([HEADER, TRANSPORT, BEGIN, ["await", 0]], "line 4: .*under way in slot 0 that can await"),
        ([HEADER, END, END], "line 3: .*a line after the end"),
        # Logs that are valid and prove nothing.
        ([HEADER, TRANSPORT, BEGIN], "the file of rank 0 ends before its process did"),
        ([HEADER, TRANSPORT, BEGIN, ["fail", 0, "rank 1 is gone"], END],
         "a transport of rank 0 broke: rank 1 is gone.*came to its end with 1 operations under"),
        ([HEADER, TRANSPORT, END], "recorded no operation: there is nothing to prove"),
        ([["log", VERSION, 0, 3]], "jobs of 3 ranks, with none of rank 1, none of rank 2; give"),
    ],
)  # fmt: skip
def test_what_proves_nothing_says_why(folder: Path, judged: Any, lines: Events, words: str) -> None:
    write(folder, *lines)
    judged(2, words)


def test_files_of_one_run(tmp_path: Path, folder: Path, judged: Any) -> None:
    judged(2, "holds no rank_.*.jsonl; give the folder", tmp_path)
    judged(2, "cannot read", tmp_path / "gone.jsonl")
    write(folder, HEADER, TRANSPORT, BEGIN, FINISH, ["close", 0], END)
    judged(0, "proved: 1 ranks, 1 operations")
    for rank in range(2):
        write(folder, ["log", VERSION, 0, 3], rank=rank)
    judged(2, "with 2 of rank 0, none of rank 1")
    write(folder, ["log", VERSION, 1, 2], rank=1)
    judged(2, "jobs of 2 and 3 ranks, with none of rank 2")


# ----------------------------------------------------------------------------- two ranks


def two_ranks(folder: Path, *of_ranks: Events) -> None:
    """Two ranks with two transports; a file whose events end with ``...`` just ends."""
    for rank, events in enumerate(of_ranks):
        groups = [["transport", number, [0, 1]] for number in range(2)]
        lines = events[:-1] if events[-1:] == [...] else [*events, END]
        write(folder, ["log", VERSION, rank, 2], *groups, *lines, rank=rank)


def steps(slot: int, rule: Rule) -> tuple[Events, Events, Events]:
    """The events of a program of three chunks: its begin, those up to its ``AheadEnd``, the rest.

    They are the same on both ranks.
    """
    schedule = {"shape": "shifted", "lanes": 1, "chunks": 3}
    program = rule.program(RankSpec(Schedule(**schedule), 0, 2))
    places = [at for at, step in enumerate(program.code) if isinstance(step, Post | Wait)]
    events = [["at", slot, at] for at in places]
    ahead = sum(at < program.ahead_end for at in places)
    arguments = list(vars(rule).values())
    begun = begin(slot, rule=type(rule).__name__, arguments=arguments, schedule=schedule)
    return [begun], events[:ahead], [*events[ahead:], ["finish", slot]]


A, B = ([begin(n, n), ["at", n, 0], ["at", n, 2]] for n in range(2))
ENDS = [["finish", 0], ["finish", 1]]
T0, T1 = ["thread", 0], ["thread", 1]
POSTED = [[begin(n), ["at", n, 0]] for n in range(3)]
THREE = [event for n in range(3) for event in (["at", n, 2], ["finish", n])]
TWO_GROUPS = [
    *[begin(slot, slot) for slot in range(2)],
    *[[*event, at] for at in (0, 2) for event in (["at", 1], ["at", 0])], *ENDS[::-1],
]  # fmt: skip
MEETS = [*ONCE, ["meet", 0, "here"]]
FIRST, SECOND = ([begin(0, n), ["at", 0, 0], ["at", 0, 2], ...] for n in range(2))

GATHER, SCATTER = (
    ["issue", slot, 0, {"name": name, "kind": kind, "bytes": 64, "dtype": "torch.float32"}]
    for slot, name, kind in ((1, "gather", "all_gather"), (2, "scatter", "reduce_scatter"))
)
AWAITED = [["await", 1], ["await", 2]]
COLLECTIVES = [GATHER, SCATTER, AWAITED[0], *ONCE, AWAITED[1]]


def changed(**changes: Any) -> Events:
    return [begin(**changes), POST, WAIT, FINISH]


CASES: list[tuple[Events, Events, int, str]] = [
    (ONCE, ONCE, 0, "^proved: 2 ranks"),
    # What rank 1 does not do.
    (ONCE, [], 1, r"^refuted.*rank 1 lacks operation 0 \(op\) of the group of ranks 0, 1, which"),
    (ONCE, [BEGIN, WAIT, POST, FINISH], 1, "is at 'wait .*' where its program has 'post"),
    (ONCE, [BEGIN, ["at", 0, 9], FINISH], 1, "is at its end where its program has 'post "),
    (ONCE, [BEGIN, POST, WAIT, WAIT, FINISH], 1, "is at 'wait .* where its program has "),
    (ONCE, changed(arguments=[5]), 1, r"arguments \[4\] on rank 0, \[5\] on rank 1"),
    (ONCE, changed(arguments=[5]), 1, "wrong data: rank . sends .* rows. .* expects .* rows."),
    (ONCE, changed(dtype="torch.float64"), 1, "dtype .*32 on rank 0, .*64 on rank 1"),
    # Each rank waits for one of two operations before it posts the other: not so in two threads.
    ([*A, *B, *ENDS], [*B, *A, *ENDS], 1, r"deadlock: rank 0 waits for rank 1 to open lane"
     r" 0 between them for block 0 \(4 .*and so round to rank 0"),
    ([*A, T1, *B, *ENDS], [*B, T1, *A, *ENDS], 0, "proved"),
    # A thread goes on behind a point where nothing is in flight.
    ([T1, *ONCE, *A, *B, *ENDS], [T1, *ONCE, *B, *A, *ENDS], 1, "deadlock"),
    ([T1, *ONCE, *A, T0, *B, *ENDS], [T1, *ONCE, *B, T0, *A, *ENDS], 0, "proved"),
    # The same lines again, but now all in thread 0.
    ([T1, *ONCE, *[*A, T0, *B, *ENDS] * 2], [T1, *ONCE, *[*B, T0, *A, *ENDS] * 2], 1, "deadlock"),
    # Threads post in the order of the log.
    ([*POSTED[0], T1, *POSTED[1], T0, *POSTED[2], *THREE],
     [*POSTED[0], *POSTED[1], *POSTED[2], *THREE], 0, "proved"),
    # A bucket is not held by those of another group.
    (TWO_GROUPS, TWO_GROUPS, 0, "proved"),
    (MEETS, MEETS, 0, "proved"),
    (MEETS, [*ONCE, ["meet", 0, "there"]], 1, "place here on rank 0, there on rank 1"),
    (MEETS, ONCE, 1, "rank 0 waits for rank 1 to come to here"),
    # Both ranks were killed in their waits for each other.
    (FIRST, SECOND, 1, "and so round to rank 0"),
    # A rank that was in neither a wait nor a post may have continued.
    (FIRST, [SECOND[0], ...], 2, "and nothing more is known of rank 1"),
    (FIRST, SECOND[:1], 1, r"and rank 1 has nothing more to do.*rank 1 lacks operation 0 \(op\)"),
    # Collectives.
    (COLLECTIVES * 2, COLLECTIVES * 2, 0, "proved"),  # an awaited slot is used again
    (COLLECTIVES, [SCATTER, GATHER, *COLLECTIVES[2:]], 1, r"wrong data: rank \d sends .* of collec"
     r"tive 0 \(.*same as collective 0 \(gather\) of .*: name gather on rank 0, scatter on rank 1; "
     "kind all_gather on"),
    (COLLECTIVES, [GATHER, *COLLECTIVES[2:-1]], 1, r"rank 1 lacks collective 1 \(scatter\)"),
    (COLLECTIVES, COLLECTIVES[:-1], 1, r"rank 1, collective 1 \(scatter\) of .*: it began it and "
     "never waited for it"),
    ([GATHER, AWAITED[0], *ONCE], [*ONCE, GATHER, AWAITED[0]], 1,
     r"deadlock.*(open|waits on) lane of collectives .*all_gather \(64 bytes\) from rank \d .*"
     "round to rank"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_two_ranks_did_is_judged(folder: Path, judged: Any, number: int) -> None:
    first, second, code, words = CASES[number]
    two_ranks(folder, first, second)
    judged(code, words)


def test_programs_under_way_at_once(folder: Path, judged: Any) -> None:
    def programs(rule: Rule) -> list[tuple[Events, Events, Events]]:
        return [steps(slot, rule) for slot in range(2)]

    # Memory for one piece of three.
    (a, a_ahead, a_rest), (b, b_ahead, b_rest) = programs(BucketScatter(6, 1, 1))
    (g, *gathered), (h, *other) = programs(BucketGather(6))
    (column, ahead, behind), _ = programs(ColumnBackward(8, 4, 4, True, True))
    use = [event for part in steps(2, GatherUse(8, 4)) for event in part]
    late = [*a, *a_ahead, *b, *b_ahead, *a_rest, *use, *b_rest]
    early = [*a, *a_ahead, *a_rest, *b, *b_ahead, *use, *b_rest]
    reversed_ = [*a, *b, *b_ahead, *b_rest, *a_ahead, *a_rest]
    posts_early = "operation 1 .*: it posts before an earlier bucket has"
    crossed = [
        [*g, *h, *[event for part in (*one, *two) for event in part]]
        for one, two in ((gathered, other), (other, gathered))
    ]
    for events, code, words in (
        # A bucket after the other, even where it would not hang: it is the same on all ranks.
        ((late, late), 1, posts_early),
        ((late, early), 1, posts_early),
        ((reversed_, reversed_), 1, posts_early),
        # Each rank waits for data that the other sends later.
        (crossed, 1, "deadlock|wrong data|it waits"),
        # A weight is gathered before an operation on one rank and after it on the other.
        (
            ([*column, *ahead, *use, *behind], [*column, *use, *ahead, *behind]), 1,
            r"wrong data: rank . sends block . .* expects blo",
        ),
    ):  # fmt: skip
        two_ranks(folder, *events)
        judged(code, words)


def test_what_repeats_itself_is_judged_once(
    folder: Path, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated, real = [], verify_log.Rendezvous
    monkeypatch.setattr(verify_log, "Rendezvous", lambda *args: simulated.append(1) or real(*args))
    two_ranks(folder, ONCE * 500, ONCE * 500)
    judged(0, "2 ranks, 1000 operations, 2000 posts")
    assert len(simulated) == 3  # the first operation, the others, the end of the log
    # A fault in one of the repetitions is found.
    two_ranks(folder, ONCE * 500, [*ONCE * 300, *ONCE[:2], FINISH, *ONCE * 199])
    words = r"rank 1, operation 300 \(op\) of the group of ranks 0, 1: it finishes without"
    judged(1, f"{words} 'wait for step 0'")


def test_no_more_than_a_few_faults_are_told(folder: Path, judged: Any) -> None:
    events = [event for slot in range(10) for event in (begin(slot), ["at", slot, 0])]
    events += [["finish", slot] for slot in range(10)]
    two_ranks(folder, events, events)
    assert judged(1, "refuted").count("finishes without") == 8
