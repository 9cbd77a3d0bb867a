"""The report on a training: waits, times, a verdict that can be False."""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.runtime.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from scripts.cpu_pretraining import compare
from scripts.cpu_pretraining.compare import Outcome
from scripts.cpu_pretraining.training import timed_waits

FIVE = (5.5, 2.5)


def test_every_wait_for_a_transfer_is_timed(tmp_path: Path) -> None:
    untimed = dist.Work.wait
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with timed_waits() as waits:
            for count, collective in enumerate(
                (all_gather_rows, reduce_scatter_rows, all_to_all_rows), start=1
            ):
                collective(torch.ones(4, 2), dist.group.WORLD)
                assert len(waits) == count
            work = dist.all_reduce(torch.ones(2), async_op=True)
            assert len(waits) == 3
            work.wait()
        assert len(waits) == 4
        assert all(begin < end for begin, end in waits)
    finally:
        dist.destroy_process_group()
    assert dist.Work.wait is untimed


def outcome(losses: Sequence[float], weights: str = "a", times: Sequence[float] = ()) -> Outcome:
    """Iterations with these losses and times in ms, a quarter of which is spent in one wait."""
    seconds = [ms / 1e3 for ms in times or (1.0,) * len(losses)]
    waits = [[(time / 4, time / 2)] for time in seconds]
    return Outcome(list(losses), seconds, waits, weights_sha256=weights)


def of_times(*times: float) -> Outcome:
    return outcome([1.0] * len(times), times=times)


@pytest.mark.parametrize(
    ("form", "changed"),
    [
        ("", None),
        ("commfuse", outcome([5.5, math.nextafter(2.5, 3.0)])),
        ("commfuse", outcome(FIVE, "c")),
        ("overlap", outcome([5.5, 2.75], "c")),
    ],
)
def test_the_verdict_sees_one_bit(form: str, changed: Any) -> None:
    other = outcome([5.5, 2.75], "b")
    runs = {"plain": outcome(FIVE), "commfuse": outcome(FIVE), "megatron": other, "overlap": other}
    runs |= {form: changed} if form else {}
    assert compare.identical(runs) is not bool(form)
    lines = compare.report(runs)
    for a, b in (("plain", "commfuse"), ("megatron", "overlap")):
        same = f"losses and weights, {a} and {b}: {'not ' * (b == form)}equal bit for bit"
        assert same in lines
    hashes = [f"sha256 of all weights, {name}: {run.weights_sha256}" for name, run in runs.items()]
    assert lines[1:5] == hashes


def test_a_difference_of_times_has_a_range_and_ten_iterations_behind_it() -> None:
    def said(fast: float, counted: int) -> list[str]:
        """The report on times from ``fast`` ms on, against times from 20 ms on."""
        slow, other = (of_times(9, 9, 9, *range(at, at + counted)) for at in (20, fast))
        return compare.report({"plain": slow, "commfuse": other, "megatron": slow, "overlap": slow})

    assert not any(line.startswith("time of an iteration") for line in said(11, 9))
    assert "give --train-iters 13 or more" in said(11, 9)[-1]
    shorter = (
        "36.7 % shorter (0.015 s, not 0.025 s; 20.2 to 50.5 % shorter by the quartiles of 10 "
        "iterations)"
    )
    times = [line for line in said(11, 10) if line.startswith("time of an iteration")]
    assert [line.split(", ")[1].split(": ")[0] for line in times] == [
        *("commfuse against plain", "commfuse against megatron", "overlap against megatron"),
    ]
    assert [shorter in line for line in times] == [True, True, False]
    assert "40.8 % longer" in "".join(said(30, 10))


def test_the_fastest_iteration_after_the_first_ones_is_drawn(monkeypatch, tmp_path) -> None:
    times, drawn = [9.0, 0.1, 7.0, 0.5, 0.1, 0.2], Mock()
    waits = [[(0.01 * place, 0.05)] for place in range(6)]
    monkeypatch.setattr(compare, "gantt", drawn)
    monkeypatch.setattr(compare, "draw", Mock())
    compare.draw_timelines({"overlap": [Outcome([], times, waits)] * 2}, None, tmp_path / "x.png")
    (row,) = drawn.call_args.args[2]
    assert row.label.endswith("0.100 s, of which 0.010 s waiting for transfers")
    bars = [(bit.start, bit.end, bit.kind) for bit in row.bits if bit.lane == "rank 1"]
    assert sorted(bars) == [(0, 40, "work"), (40, 50, "waiting"), (50, 100, "work")]


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    path = tmp_path / "timelines.png"
    runs = {"megatron": [of_times(1, 1, 1, 2)]}
    assert compare.draw_timelines(runs, 80.0, path) == f"{path} was not drawn: No space left"
