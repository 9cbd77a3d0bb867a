"""State of a run: which checkpoint is used, metrics on a full disk, samples by index."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.cpu_pretraining import __main__ as command
from scripts.cpu_pretraining.arguments import UsageError, parse_arguments
from scripts.cpu_pretraining.checkpoint import (
    CheckpointError,
    _prune,
    find_checkpoint,
    load_state,
    run_facts,
)
from scripts.cpu_pretraining.compare import forms
from scripts.cpu_pretraining.data import load_corpus
from scripts.cpu_pretraining.outcome import MetricsLog, plot_loss, read_metrics


def facts_of(*argv: str) -> dict[str, Any]:
    return run_facts(parse_arguments(argv), "data")


def write_checkpoint(folder: Path, name: str) -> Path:
    checkpoint = folder / name
    checkpoint.mkdir(parents=True)
    state = {"run": facts_of(), "iteration": 3, "training": {}}
    torch.save(state, checkpoint / "rank_0.pt")
    return checkpoint


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
        assert forms(demonstration) == ["megatron", "overlap"]


def test_the_latest_complete_checkpoint_is_found_and_two_are_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --resume out to start anew"):
        find_checkpoint(tmp_path, facts_of())
    for name in ("iter_0000100", "iter_0000200", ".iter_0000300.partial", "iter_of_mine"):
        write_checkpoint(tmp_path, name)
    assert find_checkpoint(tmp_path, facts_of()) == (tmp_path / "iter_0000200", [])
    with pytest.raises(UsageError, match="with hidden_size 256, but this run has 128; set"):
        find_checkpoint(tmp_path, facts_of("--hidden-size", "128"))
    _, notes = find_checkpoint(tmp_path, facts_of("--lr", "0.01"))
    assert notes == ["lr differs from the checkpoint's (0.002, now 0.01): losses will too"]
    for name in ("iter_0000300", "iter_0000900"):
        write_checkpoint(tmp_path, name)
    _prune(tmp_path, "iter_0000300")
    # 900 belongs to a run that was abandoned by resuming from an older checkpoint.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000200", "iter_0000300"]


class Executed:
    """An object whose unpickling would call ``os.mkdir``."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_a_file_that_is_no_state_is_refused_and_not_executed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_checkpoint(tmp_path, "iter_0000003") / "rank_0.pt"
    good = path.read_bytes()
    torch.save({"run": Executed()}, path)
    for content in (path.read_bytes(), good[: len(good) // 2], b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"rank_0\.pt is missing or damaged \(.*; move"):
            find_checkpoint(tmp_path, facts_of())
    with pytest.raises(CheckpointError, match=r"rank_1\.pt is missing"):
        load_state(path.parent, 1)
    assert not (tmp_path / "executed").exists()


def test_metrics_on_a_full_disk(
    small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk(8) / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for iteration in range(1000):
        log.append({"iteration": iteration, "lm_loss": 1.0})
    assert capsys.readouterr().err.count("cannot be written any more: No space left") == 1
    entries = read_metrics(path)
    assert [entry["iteration"] for entry in entries] == list(range(len(entries)))
    assert 50 < len(entries) < 1000
    plot_loss(path.parent)
    assert "was not drawn: No space left" in capsys.readouterr().out


def test_a_sample_depends_on_seed_and_index_only(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\0\xff" * 500)
    (tmp_path / "a").write_bytes(bytes(range(256)))
    (tmp_path / ".hidden").write_bytes(b"no")
    corpus, indices = load_corpus(tmp_path, 16), range(64)
    assert (corpus.documents, len(corpus.tokens)) == (2, 257 + 1001)
    assert corpus.tokens[:260].tolist() == [*range(256), 256, 0, 255, 0]
    inputs, labels = corpus.batch([5, 6], 16, seed=1)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert torch.equal(inputs[1], corpus.batch([6], 16, seed=1)[0][0])
    first, second = (corpus.batch(indices, 16, seed)[0] for seed in (1, 2))
    assert not torch.equal(first, second)
    standard = load_corpus(None, 16)
    assert len(standard.tokens) - (8 << 20) in range(1 << 20)
    short = tmp_path / "b"
    short.write_text("abc")
    with pytest.raises(UsageError, match="has 4 tokens, but one sample needs 17; give a file"):
        load_corpus(short, 16)
    with pytest.raises(UsageError, match=r"cannot read .*absent: No such file"):
        load_corpus(tmp_path / "absent", 16)
