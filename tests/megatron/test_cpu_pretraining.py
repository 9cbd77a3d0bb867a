"""The laptop's pretraining: bits and failures of real trainings at toy size, and its report."""

import errno
import io
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.order_log.verify_log import verify_logs
from scripts.cpu_pretraining import __main__ as command
from scripts.cpu_pretraining import compare, data
from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.compare import TrainingOutcome
from scripts.cpu_pretraining.data import load_corpus
from scripts.cpu_pretraining.training import TrainingWorker
from tests.distributed.ranks import Ranks
from tests.limits import LIMIT
from tests.megatron.training import without_groups_afterwards

TINY = (
    "--fp32 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --distributed-timeout-minutes 2"
)
LINE = re.compile(
    r"^ iteration +(\d+)/ +4 .* exposed communication \(ms\): ([\d.]+) .*"
    r" lm loss: (\S+) . grad norm: [\d.]+ . tokens/s: \d+ .$",
    re.M,
)
long = pytest.mark.long
REPLICAS = "--tensor-model-parallel-size 1 --data-parallel-size 2"
ULYSSES = "--tensor-model-parallel-size 1 --context-parallel-size 2 --commfuse-ulysses"
OVERLAP = "--train-iters 2 --commfuse-overlap"


def asked(rank: int, method: str, args: Sequence[Any]) -> tuple[Any, str]:
    """Calls a method of the worker on one rank; returns its result and its output."""
    with without_groups_afterwards(), redirect_stdout(io.StringIO()) as out:
        return getattr(TrainingWorker(), method)(*args), out.getvalue()


def pretrained(group: Ranks, folder: Path, options: str, code: int = 0) -> str:
    """What the command prints with these options after :data:`TINY`, on the ranks of a group."""

    def ask(method: str, *args: Any) -> list[Any]:
        results = group.run(asked, method, args)
        print(results[0][1], end="")
        return [value for value, _ in results]

    def started(size: int, **_: Any) -> Any:
        assert size == group.size
        return nullcontext(SimpleNamespace(ask=ask))

    with (
        patch.object(command, "Ranks", started),
        patch.dict(os.environ),
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(printed),
    ):
        done = command.main([*f"{TINY} {options} --output".split(), str(folder)])
    assert done == code, printed.getvalue()
    return printed.getvalue()


def test_layouts_agree(ranks, tmp_path: Path) -> None:
    expected: list[float] = []
    for layout in (
        *("", "--tensor-model-parallel-size 1", REPLICAS, ULYSSES),
        f"{REPLICAS} --use-distributed-optimizer --recompute --commfuse-dp --plain",
    ):
        alone = layout.endswith("size 1")
        printed = pretrained(ranks(1 if alone else 2), tmp_path, layout)
        assert re.search(r"\nsha256 of all weights: \w{64}\n$", printed)
        assert "buckets" not in printed, "the plain form leaves them to Megatron"
        numbers, exposed, losses = zip(*LINE.findall(printed), strict=True)
        assert [int(number) for number in numbers] == [1, 2, 3, 4]
        assert alone or max(map(float, exposed)) > 0
        actual = [float(loss) for loss in losses]
        expected = expected or actual
        assert actual[-1] < actual[0]
        assert actual[0] == pytest.approx(expected[0], rel=1e-4)
        assert actual == pytest.approx(expected, rel=1e-3)
    assert not list(tmp_path.iterdir()), "a training leaves no file"


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        pytest.param("--bf16", "qkv proj fc1 fc2 output", marks=long),
        (ULYSSES, "ulysses qkv proj"),
        pytest.param(
            f"{REPLICAS} --use-distributed-optimizer --bf16 --commfuse-dp",
            "gradients parameters",
            marks=long,
        ),
        ("--commfuse-overlap --no-use-commfuse", ""),
        (
            "--commfuse-overlap --recompute --no-gradient-accumulation-fusion",
            "qkv proj fc1 fc2 output",
        ),
    ],
)
def test_compared_forms_have_the_same_bits(ranks, tmp_path: Path, options, fused: str) -> None:
    printed = pretrained(ranks(2), tmp_path, f"--compare --train-iters 3 {options}")
    assert printed.splitlines()[-1] == "identical: True"
    hashes = dict(re.findall(r"sha256 of all weights, (\w+): (\w{64})", printed))
    assert ("plain" in hashes) == ("--no-use-commfuse" not in options)
    assert hashes.get("plain") == hashes.get("commfuse")
    # Without this the comparison could pass because nothing was fused.
    for layer in fused.split():
        assert re.search(rf"commfuse: +{layer}: [1-9]\d* (forward calls|buckets) fused", printed)
    # Three iterations of four micro-batches, two layers, each computed twice.
    assert ("qkv: 48 forward calls fused" in printed) == ("--recompute" in options)
    assert f"{tmp_path}/timelines.png was not drawn: no iteration" in printed
    assert ("overlap" in hashes) == ("--commfuse-overlap" in options)
    if "overlap" in hashes:
        assert hashes["overlap"] == hashes["megatron"]
        assert "3 of 4 forwards of stage 0 run beside a backward" in printed


def test_the_order_of_transfers_is_recorded_and_proved(ranks, tmp_path: Path) -> None:
    """Also of fused layers beside another micro-batch, which have the bits of the plain form."""
    # Two ranks; the watched micro-batch of the first iteration and the four of the second, which
    # have 28 collectives each.
    ends, collectives = [], 2 * (1 + 4) * 28
    for options, operations in (
        ("--no-use-commfuse", collectives),
        ("--commfuse-chunks 2", 346),
        ("--commfuse-chunks 2 --plain", collectives),
    ):
        log = tmp_path / str(len(ends))
        words = f"{OVERLAP} {options} --commfuse-order-log {log}"
        ends.append(pretrained(ranks(2), tmp_path, words))
        proof = verify_logs([log])
        assert (proof.faults, proof.notes, proof.ranks) == ([], [], 2)
        assert proof.operations == operations
    assert re.search(
        r"  qkv: 13 forward calls fused\n(.*\n)*.* 3 forward calls by Megatron, because forward",
        ends[1],
    )
    assert "fused\n" not in ends[2]
    _, fused, plain = (
        re.findall(r"lm loss: \S+|^sha256 of all weights: .*", end, re.M) for end in ends
    )
    assert fused == plain
    assert len(fused) == 3


def test_a_training_that_diverges_says_so(ranks, tmp_path: Path) -> None:
    options = "--tensor-model-parallel-size 1 --lr 1e9"
    printed = pretrained(ranks(1), tmp_path, options, code=1)
    assert re.search(r"error: iteration \d: .* is (nan|inf); lower --lr \(now 1000000000", printed)


def of_times(*times: float) -> TrainingOutcome:
    """A training with iterations of these times in ms."""
    return TrainingOutcome([1.0] * len(times), [ms / 1e3 for ms in times], [[]] * len(times), "a")


@pytest.mark.parametrize(
    ("form", "changed"),
    [
        ("", None),
        ("commfuse", TrainingOutcome([5.5, math.nextafter(2.5, 3.0)], weights_sha256="a")),
        ("commfuse", TrainingOutcome([5.5, 2.5], weights_sha256="c")),
        ("overlap", TrainingOutcome([5.5, 2.75], weights_sha256="c")),
    ],
)
def test_the_verdict_sees_one_bit(form: str, changed: Any) -> None:
    first = TrainingOutcome([5.5, 2.5], weights_sha256="a")
    other = TrainingOutcome([5.5, 2.75], weights_sha256="b")
    runs = {"plain": first, "commfuse": first, "megatron": other, "overlap": other}
    runs |= {form: changed} if form else {}
    assert compare.identical(runs) is not bool(form)
    lines = compare.report(runs)
    for a, b in (("plain", "commfuse"), ("megatron", "overlap")):
        same = f"losses and weights, {a} and {b}: {'not ' * (b == form)}equal bit for bit"
        assert same in lines
    hashes = [f"sha256 of all weights, {name}: {run.weights_sha256}" for name, run in runs.items()]
    assert lines[1:5] == hashes


def test_a_time_difference_has_a_range_of_ten_iterations() -> None:
    def said(fast: float, counted: int) -> list[str]:
        """The report on times from ``fast`` ms on, against times from 20 ms on."""
        slow, other = (of_times(9, 9, 9, *range(at, at + counted)) for at in (20, fast))
        return compare.report({"plain": slow, "commfuse": other, "megatron": slow, "overlap": slow})

    few = said(11, 9)
    assert not any(line.startswith("time of an iteration") for line in few)
    assert "give --train-iters 13 or more" in few[-1]
    shorter = (
        "36.7 % shorter (0.015 s, not 0.025 s; 20.2 to 50.5 % shorter by the quartiles of 10 "
        "iterations)"
    )
    assert said(11, 10)[-3:] == [
        f"time of an iteration, commfuse against plain: {shorter}",
        f"time of an iteration, commfuse against megatron: {shorter}",
        said(20, 10)[-1],
    ]
    assert "40.8 % longer" in said(30, 10)[-2]


def test_the_fastest_iteration_after_the_first_ones_is_drawn(monkeypatch, tmp_path) -> None:
    times, drawn = [9.0, 0.1, 7.0, 0.5, 0.1, 0.2], Mock()
    waits = [[(0.01 * place, 0.05)] for place in range(6)]
    monkeypatch.setattr(compare, "gantt", drawn)
    monkeypatch.setattr(compare, "draw", Mock())
    compare.draw_timelines(
        {"overlap": [TrainingOutcome([], times, waits)] * 2}, None, tmp_path / "x.png"
    )
    (row,) = drawn.call_args.args[2]
    assert row.label.endswith("0.100 s, of which 0.010 s waiting for transfers")
    bars = [(bit.start, bit.end, bit.kind) for bit in row.bits if bit.lane == "rank 1"]
    assert sorted(bars) == [(0, 40, "work"), (40, 50, "waiting"), (50, 100, "work")]


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python, which draws, is not installed")
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    path = tmp_path / "timelines.png"
    runs = {"megatron": [of_times(1, 1, 1, 2)]}
    assert compare.draw_timelines(runs, 80.0, path) == f"{path} was not drawn: No space left"


@pytest.mark.parametrize(("codes", "end"), [([0, 0], 0), ([0, 1], 1), ([0, 2], 0), ([1], 1)])
def test_without_options_the_command_ends_with_a_demonstration(monkeypatch, codes, end) -> None:
    run = Mock(side_effect=codes)
    monkeypatch.setattr(command, "_run", run)
    assert command.main([]) == end
    assert run.call_count == len(codes)
    for call in run.call_args_list[1:]:
        demonstration = parse_arguments(call.args[0])
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


def test_ranks_that_do_not_answer_may_be_given_more_time(monkeypatch, tmp_path, capsys) -> None:
    def late(*_: Any, option: str, **__: Any) -> None:
        raise command.RanksError(f"no answer from rank 0 within 180 s; give more with {option}")

    monkeypatch.setattr(command, "Ranks", late)
    assert command.main(["--output", str(tmp_path)]) == 1
    assert "give more with --distributed-timeout-minutes\n" in capsys.readouterr().err


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


@long
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGINT, "data: "),
        (signal.SIGINT, "iteration        2/"),
        (signal.SIGTERM, "iteration        2/"),
    ],
)
def test_a_signal_ends_it_quietly_and_leaves_no_files(tmp_path: Path, how: int, said: str) -> None:
    (folder := tmp_path / "temporary").mkdir()
    options = f"{TINY} --train-iters 100000 --output {tmp_path}"
    with subprocess.Popen(
        [sys.executable, "-m", command.__package__, *options.split()],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while said not in (line := process.stdout.readline()):
            assert line, "it ended"
        # A terminal sends Ctrl-C to all processes.
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
        out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + how, out
    assert "Traceback" not in out
    assert not list(folder.iterdir())
