"""Without processes: the demonstration, the data by index, the report on a training."""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.runtime.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from scripts.cpu_pretraining import __main__ as command
from scripts.cpu_pretraining import compare, data
from scripts.cpu_pretraining.arguments import UsageError, parse_arguments
from scripts.cpu_pretraining.compare import Outcome
from scripts.cpu_pretraining.data import load_corpus
from scripts.cpu_pretraining.training import timed_waits

FIVE = (5.5, 2.5)


def test_every_wait_for_a_transfer_is_timed(one_rank: None) -> None:
    untimed = dist.Work.wait
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


@pytest.mark.parametrize(("codes", "end"), [([0, 0], 0), ([0, 1], 1), ([0, 2], 0), ([1], 1)])
def test_without_options_the_command_ends_with_a_demonstration(monkeypatch, codes, end) -> None:
    runs: list[Any] = []

    def run(argv: Sequence[str]) -> int:
        runs.append(parse_arguments(argv))
        return codes[len(runs) - 1]

    monkeypatch.setattr(command, "_run", run)
    assert command.main([]) == end
    assert len(runs) == len(codes)
    for demonstration in runs[1:]:
        assert demonstration.link_rate is not None
        assert compare.forms(demonstration) == ["megatron", "overlap"]


def test_links_that_cannot_have_the_rate_are_refused(monkeypatch, tmp_path, capsys) -> None:
    asked = Mock(side_effect=[["", "no socket"]])
    ranks = nullcontext(SimpleNamespace(ask=asked))
    monkeypatch.setattr(command, "Ranks", lambda *_, **__: ranks)
    assert command.main(["--link-rate", "9", "--output", str(tmp_path)]) == 2
    asked.assert_called_once_with("pace", 9.0)  # nothing trains
    message = "error: --link-rate 9 cannot be set: no socket; leave --link-rate out"
    assert message in capsys.readouterr().err


def test_a_sample_depends_on_seed_and_index_only() -> None:
    corpus, indices = load_corpus(16), range(64)
    assert len(corpus.tokens) - (8 << 20) in range(1 << 20)
    inputs, labels = corpus.batch([5, 6], 16, seed=1)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert torch.equal(inputs[1], corpus.batch([6], 16, seed=1)[0][0])
    first, second = (corpus.batch(indices, 16, seed)[0] for seed in (1, 2))
    assert not torch.equal(first, second)
    # From all of the text; some short samples of some versions are the same blanks.
    assert len(first.unique(dim=0)) > 48


def test_sources_are_read_as_bytes_in_the_order_of_their_paths(tmp_path, monkeypatch) -> None:
    (tmp_path / "b.py").write_bytes(b"\0\xff" * 500)
    (tmp_path / "a.py").write_bytes(bytes(range(256)))
    for other in ("site-packages/c.py", "d.txt"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(b"no")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus(16)
    assert (corpus.documents, len(corpus.tokens)) == (2, 257 + 1001)
    assert corpus.tokens[:260].tolist() == [*range(256), 256, 0, 255, 0]
    with pytest.raises(UsageError, match="has 1258 tokens, but one sample needs 1259; choose a sh"):
        load_corpus(1258)
