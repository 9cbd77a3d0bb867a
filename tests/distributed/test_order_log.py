"""Recorded runs of real ranks are proved; a log with a fault planted in it is refuted by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import setitem
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport, TransportError
from commfuse_npu.ops import BucketOptions, Buckets, LinearOptions, all_gather_linear
from commfuse_npu.plan.instructions import Post, Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import RULES
from commfuse_npu.plan.schedule import Place
from commfuse_npu.proof.verify_log import Verdict, verify_logs
from commfuse_npu.runtime import order_log
from commfuse_npu.runtime.order_log import OrderLog
from commfuse_npu.tools import cli
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import ATTENTION, one_layer
from tests.random_networks.network_run import run_network

LINEARS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce")

Programme = Callable[[int, OrderLog, bool], list[Transport]]
"""``programme(rank, log, batched)``; returns the transports that it made."""

WAYS = pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])


def link(log: OrderLog, batched: bool, group: Any = None) -> Transport:
    return Transport.create(group, lanes=3, timeout=PATIENT, batched=batched, order_log=log)


def record(rank: int, folder: str, programme: Programme, batched: bool) -> None:
    log = OrderLog(Path(folder), rank, dist.get_world_size())
    for transport in programme(rank, log, batched):
        transport.close()
    log.close()


def verdict(folder: Path) -> Verdict:
    return verify_logs([folder])


def layer(made: Transport, op: str, schedule: Schedule) -> None:
    run_network(one_layer(op, made.size, schedule=schedule), "fused", made)


def layers(rank: int, log: OrderLog, batched: bool, *, ops: tuple[str, ...], turns: int = 1) -> Any:
    """Of linear layers, backwards with a re-gather and a reduce-scatter under way at once."""
    made = link(log, batched)
    schedules = [Schedule("shifted", 2, 2), Schedule("shifted", 1, 4, taper=2.0)]
    if made.size % 2 == 0:
        schedules.append(Schedule("two_level", 2, 2, node_size=2))
    for schedule, op in list(product(schedules, ops)) * turns:
        layer(made, op, schedule)
    return [made]


linears = partial(layers, ops=LINEARS, turns=3)
others = partial(layers, ops=(*ATTENTION, "linear_all_to_all", "all_to_all_linear"))


def buckets(rank: int, log: OrderLog, batched: bool, scratch_bytes: int = 0) -> list[Transport]:
    """With room for one piece only, and the ranks wait in different orders."""
    made = link(log, batched)
    options = BucketOptions(
        Schedule(lanes=3, chunks=3), scratch_bytes=scratch_bytes, last_first=True
    )
    exchange = Buckets(made, options)
    for turn in range(3):
        flat = [torch.full((made.size * 10,), float(rank)) for _ in range(4)]
        handles = [
            exchange.reduce_scatter(flat[0]),
            exchange.all_gather(flat[1]),
            exchange.reduce_scatter(flat[2]),
        ]
        if (rank + turn) % 2:
            handles[1].wait()
        handles.append(exchange.all_gather(flat[3]))
        for handle in handles if rank == 0 else handles[::-1]:
            handle.wait()
    return [made]


def several_groups(rank: int, log: OrderLog, batched: bool) -> list[Transport]:
    """Tensor-parallel pairs, and pairs of replicas with two transports, all under way at once."""
    pairs = {tuple(ranks): dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])}
    mine = [group for ranks, group in pairs.items() if rank in ranks]
    tensor, gradients, parameters = (
        link(log, batched, group) for group in (mine[0], mine[1], mine[1])
    )
    options = BucketOptions(Schedule(lanes=1))
    out, back = Buckets(gradients, options), Buckets(parameters, options)
    for _ in range(3):
        first = out.reduce_scatter(torch.ones(8))
        layer(tensor, "all_gather_linear", Schedule(chunks=2))
        second = back.all_gather(torch.ones(8))
        if rank < 2:
            first.wait()
        layer(tensor, "all_gather_linear", Schedule(chunks=2))
        first.wait()
        tensor.confirm("the step")
        second.wait()
    return [tensor, gradients, parameters]


@WAYS
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("programme", [linears, others, buckets])
def test_recorded_runs_are_proved(ranks, tmp_path, programme, size: int, batched: bool) -> None:
    ranks(size).run(record, str(tmp_path), programme, batched)
    found = verdict(tmp_path)
    assert (found.faults, found.notes) == ([], [])
    assert found.operations >= 4 * size
    assert found.messages > 0


@WAYS
def test_several_groups_of_one_job(ranks, tmp_path, batched: bool) -> None:
    ranks(4).run(record, str(tmp_path), several_groups, batched)
    found = verdict(tmp_path)
    assert (found.faults, found.notes) == ([], [])
    # Two layers, forward and backward, and two buckets, three times on four ranks.
    assert found.operations == 4 * 3 * (2 * 2 + 2)


# ---------------------------------------------------------------------- planted faults


def verb_of(line: Any) -> str:
    return line[0] if isinstance(line, list) else ""


class Recorded:
    """The lines of a run of three ranks, to be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(folder.glob("rank_*.jsonl"))
        ]

    def definition(self, rank: int, number: int) -> dict[str, Any]:
        defined = (line for line in self.lines[rank] if isinstance(line, dict))
        return next(line for line in defined if line.get("program") == number)

    def program(self, rank: int, number: int) -> Program:
        """The program as it was recorded."""
        about = self.definition(rank, number)
        (batched,) = (line["batched"] for line in self.lines[rank] if "lanes" in line)
        place = Place(Schedule(**about["schedule"]), rank, len(self.lines), batched)
        return RULES[about["rule"]](place, *about["arguments"])

    def places(self, rank: int, kind: type) -> list[int]:
        """The lines in which a rank posts, or waits, in the third operation."""
        lines = self.lines[rank]
        begin = [at for at, line in enumerate(lines) if verb_of(line) == "begin"][2]
        code = self.program(rank, lines[begin][2]).code
        end = next(at for at in range(begin, len(lines)) if verb_of(lines[at]) == "finish")
        ats = [at for at in range(begin, end) if verb_of(lines[at]) == "at"]
        return [at for at in ats if isinstance(code[lines[at][2]], kind)]

    def write(self) -> None:
        for rank, lines in enumerate(self.lines):
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (self.folder / f"rank_{rank:05d}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def whole_run(ranks, tmp_path_factory) -> Callable[[bool], Path]:
    """The folder of a run of three ranks, which tests copy and change."""
    folders: dict[bool, Path] = {}

    def of(batched: bool) -> Path:
        if batched not in folders:
            folders[batched] = tmp_path_factory.mktemp("run")
            ranks(3).run(record, str(folders[batched]), linears, batched)
        return folders[batched]

    return of


@pytest.fixture
def run(whole_run, tmp_path) -> Callable[[bool], Recorded]:
    def of(batched: bool) -> Recorded:
        for path in whole_run(batched).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return Recorded(tmp_path)

    return of


def posts_swapped(run: Recorded) -> None:
    one, two = run.places(1, Post)[:2]
    run.lines[1][one], run.lines[1][two] = run.lines[1][two], run.lines[1][one]


def an_operation_is_missing(run: Recorded) -> None:
    lines = run.lines[1]
    finishes = [i for i, line in enumerate(lines) if verb_of(line) == "finish"]
    gone = range(finishes[2] + 1, finishes[3] + 1)
    run.lines[1] = [line for i, line in enumerate(lines) if i not in gone or not verb_of(line)]


def other_lanes(run: Recorded) -> None:
    run.definition(1, 2)["schedule"]["lanes"] = 1


def other_size(run: Recorded) -> None:
    run.definition(1, 2)["arguments"][0] *= 2


def changed(**fields: str) -> Callable[[Recorded], None]:
    return lambda run: run.definition(1, 2).update(fields)


FAULTS: dict[str, tuple[Callable[[Recorded], object], str]] = {
    "posts swapped": (posts_swapped, "it comes to 'post .*' where its program has 'post"),
    "a post is missing": (
        lambda run: run.lines[1].pop(run.places(1, Post)[1]),
        "it comes to .* where its program has 'post ",
    ),
    "no such place": (
        lambda run: setitem(run.lines[1][run.places(1, Post)[0]], 2, 1000),
        "it comes to its end where its program has 'post ",
    ),
    "waited for twice": (
        lambda run: run.lines[1].insert(at := run.places(1, Wait)[0], run.lines[1][at]),
        "it comes to '(aside: )?wait .* where its program has ",
    ),
    "never waited for": (
        lambda run: run.lines[1].pop(run.places(1, Wait)[-1]),
        "it finishes where its program has 'wait ",
    ),
    "rows of nothing": (
        lambda run: run.lines[1].insert(run.places(1, Post)[0], ["rows", 0, 1]),
        "it waits for what step 1 receives, which is not posted",
    ),
    "other lanes": (other_lanes, "schedule .*'lanes': 2.* on rank 0, .* on rank 1"),
    "other size": (other_size, r"arguments \[.*\] on rank 0, \[.*\] on rank 1"),
    "other dtype": (changed(dtype="torch.float64"), "dtype .*32 on rank 0, .*64 on rank 1"),
    "other sums": (changed(sum_dtype="torch.float64"), "sum_dtype .* on rank 0, .*64 on rank 1"),
    "other options": (changed(options="?"), r"options .* on rank 0, \? on rank 1"),
}
"""What is said of the third operation, by the rank or of two that do not do the same."""


@WAYS
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        *((fault, f"operation 2 .*: {words}") for fault, words in FAULTS.values()),
        (an_operation_is_missing, "ranks 0 and 1 do not do the same as operation 3 .*: "),
        (other_lanes, r"deadlock \((warm|cold)\): rank . waits (on|for) .*lane"),
        (other_size, "wrong data: rank . sends .* rows. .* rank . expects .* rows."),
    ],
    ids=[*FAULTS, "an operation is missing", "lanes that do not meet", "sizes that do not meet"],
)
def test_faults_are_found_and_named(run, capsys, fault, words: str, batched: bool) -> None:
    recorded = run(batched)
    recorded.write()
    assert cli.main(["verify", "--log", str(recorded.folder)]) == 0
    assert capsys.readouterr().out.startswith("proved: 3 ranks")
    fault(recorded)
    recorded.write()
    assert cli.main(["verify", "--log", str(recorded.folder)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("refuted")
    assert re.search(words, out), out
    assert "ends before its process" not in out  # they are whole, and were not read to their end


@WAYS
def test_a_run_that_was_cut_off_is_judged_as_far_as_it_goes(run, capsys, batched: bool) -> None:
    recorded = run(batched)
    path = recorded.folder / "rank_00001.jsonl"
    whole = path.read_bytes()
    for part in (0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(part * len(whole))])
        assert cli.main(["verify", "--log", str(recorded.folder)]) == 2
        out = capsys.readouterr().out
        assert out.startswith("no fault as far as it is known, which is no proof")
        assert "the file of rank 1 ends before its process did" in out
        assert "nothing more is known of rank 1" in out
    # What is wrong before the end is wrong all the same.
    other_lanes(recorded)
    recorded.write()
    path.write_bytes(path.read_bytes()[:-40])
    assert verdict(recorded.folder).faults


def gather(made: Transport, shard: torch.Tensor) -> torch.Tensor:
    options = LinearOptions(Schedule(lanes=2))
    return all_gather_linear(shard, torch.eye(2), transport=made, options=options)


def hangs(rank: int, log: OrderLog, batched: bool) -> list[Transport]:
    """Rank 1 leaves an operation out, and all fail in their waits."""
    made = Transport.create(lanes=2, timeout=PATIENT, batched=batched, order_log=log)
    for turn in range(3):
        if (rank, turn) == (1, 1):
            made.order_log = None
            break
        if turn == 1:
            made.timeout = BRIEF
        try:
            gather(made, torch.ones(1, 2))
        except TransportError:
            break
    return [made]


def test_a_run_that_failed_says_who_waits_for_whom(ranks, tmp_path) -> None:
    ranks(2).run(record, str(tmp_path), hangs, False)
    found = verdict(tmp_path)
    assert any("a transport of rank 0 broke" in note for note in found.notes)
    assert re.search("deadlock .*rank 0 waits .*rank 1 has nothing more to do", found.faults[0])
    assert any(
        re.search(r"rank 1 lacks operation 1 \(all_gather_linear\)", f) for f in found.faults
    )


# ---------------------------------------------------------------------- the recorder


def unwritable_later(rank: int, folder: str) -> str:
    """A disk that is full from the second line on."""
    path = Path(folder) / f"rank_{rank:05d}.jsonl"
    path.symlink_to("/dev/full")
    log = OrderLog(Path(folder), rank, dist.get_world_size())
    made = link(log, False)
    got = gather(made, torch.full((1, 2), float(rank)))
    made.close()
    log.close()
    return str(got.tolist())


def test_a_full_disk_ends_the_recording_and_not_the_job(ranks, tmp_path) -> None:
    assert ranks(2).run(unwritable_later, str(tmp_path)) == ["[[0.0, 0.0], [1.0, 1.0]]"] * 2


def little_memory(rank: int, folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_log, "_MOST_DEFINED", 4)
        record(rank, folder, linears, False)
    text = (Path(folder) / f"rank_{rank:05d}.jsonl").read_text()
    return text.count('["forget"]')


def test_what_is_remembered_stays_within_bounds(ranks, tmp_path) -> None:
    assert min(ranks(2).run(little_memory, str(tmp_path))) > 3
    found = verdict(tmp_path)
    assert (found.faults, found.notes) == ([], [])


@on_ranks(2)
def test_nothing_is_logged_unless_it_is_asked_for(rank: int) -> None:
    made = Transport.create(lanes=2, timeout=PATIENT)
    gather(made, torch.ones(1, 2))
    assert made.order_log is None
    made.close()
