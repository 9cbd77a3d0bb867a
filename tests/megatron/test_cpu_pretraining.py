"""The laptop's pretraining: bits and failures of real trainings at toy size, and its report."""

import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from itertools import pairwise
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
from scripts.cpu_pretraining import compare, data, timeline
from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.compare import TrainingOutcome
from scripts.cpu_pretraining.data import load_corpus
from scripts.cpu_pretraining.timeline import RecordedSpan
from scripts.cpu_pretraining.training_worker import TrainingWorker
from tests.distributed.ranks import Ranks
from tests.limits import LIMIT
from tests.megatron.training import without_groups_afterwards

TINY = (
    "--fp32 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --distributed-timeout-minutes 2"
)
LINE = re.compile(r"^(\w*) *iteration +(\d+)/\d+  loss (\d+\.\d{3})  \d+\.\d\d s$", re.M)
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
        _, numbers, losses = zip(*LINE.findall(printed), strict=True)
        assert [int(number) for number in numbers] == [1, 2, 3, 4]
        actual = [float(loss) for loss in losses]
        expected = expected or actual
        assert actual[-1] < actual[0]
        assert actual[0] == pytest.approx(expected[0], abs=1.1e-3)
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
        pytest.param(
            "--commfuse-overlap --recompute --no-gradient-accumulation-fusion",
            "qkv proj fc1 fc2 output",
            marks=long,
        ),
    ],
)
def test_compared_forms_have_the_same_bits(ranks, tmp_path: Path, options, fused: str) -> None:
    sizes = "--train-iters 3 --global-batch-size 4"
    printed = pretrained(ranks(2), tmp_path, f"--compare {sizes} {options}")
    equal = re.findall(r"and losses(.*): bitwise equal, sha256 (\w{16})\.\.\.$", printed, re.M)
    overlap = "--commfuse-overlap" in options
    assert len(equal) == 1 + overlap
    # Without this the comparison could pass because nothing was fused.
    for layer in fused.split():
        assert re.search(rf"commfuse: +{layer}: [1-9]\d* (forward calls|buckets) fused", printed)
    # Three iterations of two micro-batches, two layers, each computed twice.
    assert ("qkv: 24 forward calls fused" in printed) == ("--recompute" in options)
    first, *_ = LINE.finditer(printed)
    assert "--train-iters 3 is less than 13" in printed[: first.start()]
    assert "trace:" not in printed
    assert ("1 of 2 forwards of stage 0 run beside a backward" in printed) == overlap


def test_forms_that_take_turns_train_as_alone(ranks, tmp_path: Path) -> None:
    """In the same processes, each with its random numbers; traced and drawn."""
    parse = command.parse_arguments

    def with_dropout(argv: Sequence[str]) -> Any:
        return SimpleNamespace(**vars(parse(argv)), hidden_dropout=0.1)

    options = "--no-use-commfuse --recompute --global-batch-size 4 --train-iters 13"
    with patch.object(command, "parse_arguments", with_dropout):
        alone = pretrained(ranks(2), tmp_path, options)
        printed = pretrained(ranks(2), tmp_path, f"{options} --compare --commfuse-overlap")
    *_, times, weights, files = printed.splitlines()
    (sha256,) = re.findall(r"sha256 of all weights: (\w{16})", alone)
    assert weights == f"weights and losses: bitwise equal, sha256 {sha256}..."
    assert re.match(r"overlap: \S+ % \w+ time per iteration than Megatron's order \(", times)
    turns = [(form, int(number)) for form, number, _ in LINE.findall(printed)]
    assert turns[:6] == [
        *(("megatron", 1), ("megatron", 2), ("overlap", 1), ("overlap", 2)),
        *(("megatron", 3), ("megatron", 4)),
    ]
    assert sorted(turns) == [(form, n) for form in ("megatron", "overlap") for n in range(1, 14)]
    assert (
        max(map(len, [times, weights, *(line.group() for line in LINE.finditer(printed))])) <= 100
    )
    picture, trace = tmp_path / "timelines.png", tmp_path / "trace_view.json"
    assert files == f"picture: {picture}; trace: {trace} (Perfetto, MindStudio Insight)"
    assert picture.read_bytes().startswith(b"\x89PNG")
    check_trace(json.loads(trace.read_text("utf-8")))


def check_trace(events: list[dict[str, Any]]) -> None:
    """In four processes, of two forms on two ranks, with two micro-batches each."""
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    forms = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(forms) == 4
    timed = [event for event in events if event["ph"] == "X"]
    assert len(timed) + len(named) + len(forms) == len(events)
    for process, form in forms.items():
        threads: dict[str, list[Any]] = {}
        for event in timed:
            if event["pid"] == process:
                threads.setdefault(named[process, event["tid"]], []).append(event)
        kinds = ["forward", "recomputation", "backward", "weight gradients"]
        assert threads.keys() == {*kinds, "other", "links"}
        extents = {}
        for name, spans in threads.items():
            for one, following in pairwise(spans):
                assert 0 <= one["ts"] <= one["ts"] + one["dur"] <= following["ts"] + 1e-3
            for span in spans:
                extents.setdefault(span["name"], [span["ts"], 0])[1] = span["ts"] + span["dur"]
            if name in kinds:
                numbered = {span["name"] for span in spans} - {"waiting"}
                assert numbered == {f"{name} {number}" for number in (1, 2)}
        # More than a collective per layer, pass and micro-batch.
        assert len(threads["links"]) > 2 * 2 * 2
        beside = extents["forward 2"][0] < extents["backward 1"][1]
        assert beside == ("overlap" in form)
        # Sums of what a rank computes and waits for fill the iteration.
        total = sum(span["dur"] for name, spans in threads.items() for span in spans
                    if name != "links")  # fmt: skip
        end = max(span["ts"] + span["dur"] for span in threads["other"])
        assert total == pytest.approx(end)


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
        re.findall(r"loss \S+|^sha256 of all weights: .*", end, re.M) for end in ends
    )
    assert fused == plain
    assert len(fused) == 3


def test_a_training_that_diverges_says_so(ranks, tmp_path: Path) -> None:
    options = "--tensor-model-parallel-size 1 --lr 1e9"
    printed = pretrained(ranks(1), tmp_path, options, code=1)
    assert re.search(r"error: iteration \d: .* is (nan|inf); lower --lr \(now 1000000000", printed)


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
    for line, pair in zip(
        compare.report(runs), (("plain", "commfuse"), ("megatron", "overlap")), strict=True
    ):
        verdict = "not equal" if form in pair else "bitwise equal"
        hashes = " and ".join(dict.fromkeys(runs[name].weights_sha256 for name in pair))
        assert line == f"weights and losses of {' and '.join(pair)}: {verdict}, sha256 {hashes}..."


def test_times_are_compared_by_pairs_of_ten_iterations() -> None:
    def said(*times: float) -> list[str]:
        """The report on these times and 100 s, both multiplied by the load on the machine."""
        runs = {}
        for form, each in (("megatron", [100.0] * len(times)), ("overlap", times)):
            loaded = [seconds * (1 + number % 3) for number, seconds in enumerate(each)]
            runs[form] = TrainingOutcome(times=[9, 9, 9, *loaded])
        return list(compare.report(runs))[:-1]

    less = [*range(50, 90, 4)]
    assert said(*less) == [
        "overlap: 32.0 % less time per iteration than Megatron's order (23.0 to 41.0, quartiles of "
        "10 pairs)"
    ]
    assert len(said(*less)[0]) <= 100
    assert said(*[200 - time for time in less]) == [
        "overlap: 32.0 % more time per iteration than Megatron's order (23.0 to 41.0, quartiles of "
        "10 pairs)"
    ]
    assert said(*less[:9]) == []


def test_the_median_iteration_is_drawn(tmp_path: Path, monkeypatch) -> None:
    def iteration(ms: int) -> list[RecordedSpan]:
        return [
            RecordedSpan("forward", "forward 1", 0, ms / 4000),
            RecordedSpan("backward", "backward 1", ms / 4000, ms / 1000),
        ]

    drawn = Mock()
    monkeypatch.setattr(timeline, "draw", drawn)
    outcome = TrainingOutcome()
    for ms in (9, 9, 9, 8, 1, 5, 16, 3, 12, 2, 10, 11, 20):
        outcome.add(1.0, ms / 1000, iteration(ms))
    compare.write_median_iterations([{"megatron": outcome}] * 2, None, tmp_path)
    (charts, title, _) = drawn.call_args.args
    assert title == "The same training over loopback"
    passes, pair = (chart["data"]["values"] for chart in charts)
    assert [(bar["row"], bar["start"], bar["end"], bar["label"]) for bar in passes] == [
        (f"{rank} {kind}", *times, "1")
        for rank in (0, 1)
        for kind, times in (("forward", (0, 2)), ("backward", (2, 8)))
    ]
    assert [(bar["row"], bar["start"], bar["end"]) for bar in pair] == [("0 backward 1", 0, 6)]


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    iterations = {"megatron": [[RecordedSpan("backward", "backward 1", 0.0, 1.0)]]}
    monkeypatch.setattr(timeline, "draw", Mock(side_effect=ValueError("needs a package")))
    line = timeline.write_timelines(iterations, "x", tmp_path)
    trace = tmp_path / "trace_view.json"
    assert line == f"trace: {trace} (Perfetto, MindStudio Insight); no picture: needs a package"
    assert json.loads(trace.read_text("utf-8"))[-1]["dur"] == 1e6
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    line = timeline.write_timelines(iterations, "x", tmp_path)
    assert line == "no trace; no picture: No space left"


@pytest.mark.parametrize(("codes", "end"), [([0, 0], 0), ([0, 1], 1), ([2, 0], 0), ([1], 1)])
def test_without_options_a_comparison_comes_first(monkeypatch, codes, end, capsys) -> None:
    trained = Mock(side_effect=codes)
    monkeypatch.setattr(command, "_run", trained)
    assert command.main([]) == end
    assert trained.call_count == len(codes)
    first, *second = (parse_arguments(call.args[0]) for call in trained.call_args_list)
    assert first.link_rate is not None
    assert first.train_iters >= 13
    assert compare.forms(first) == ["megatron", "overlap"]
    assert not any(training.compare for training in second)
    assert ("Ctrl-C" in capsys.readouterr().out) == bool(second)


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
        (signal.SIGINT, "iteration      2/"),
        (signal.SIGTERM, "iteration      2/"),
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
