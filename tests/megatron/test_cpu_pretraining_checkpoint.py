"""Which checkpoint counts as complete, what is kept, and what a resumed metrics file holds."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="checkpoints are torch files")

import torch

from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.checkpoint import (
    FACTS_FILE,
    STATE_FILE,
    TRACKER,
    CheckpointError,
    FoundCheckpoint,
    _prune,
    find_checkpoint,
    load_state,
    shape_of_run,
)
from scripts.cpu_pretraining.metrics import MetricsLog, plot_loss, read_metrics
from scripts.cpu_pretraining.usage_error import UsageError


def facts_of(*argv: str) -> dict[str, Any]:
    args: argparse.Namespace = parse_arguments(argv, world_size=2)
    return shape_of_run(args, "data")


def write_checkpoint(folder: Path, iteration: int, name: str | None = None) -> Path:
    checkpoint = folder / (name or f"iter_{iteration:07d}")
    for rank in range(2):
        state = checkpoint / f"mp_rank_{rank:02d}_000" / STATE_FILE
        state.parent.mkdir(parents=True)
        state.touch()
    (checkpoint / FACTS_FILE).write_text(json.dumps(facts_of()))
    return checkpoint


def test_latest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 100)
    write_checkpoint(tmp_path, 200)
    (tmp_path / TRACKER).write_text("200\n")
    found = find_checkpoint(tmp_path, facts_of())
    assert (found.iteration, found.notes) == (200, ())


def test_kill_while_writing_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 100)
    (tmp_path / TRACKER).write_text("100\n")
    write_checkpoint(tmp_path, 200, ".iter_0000200.partial")
    assert find_checkpoint(tmp_path, facts_of()).iteration == 100


def test_kill_before_the_number_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 100)
    write_checkpoint(tmp_path, 200)
    (tmp_path / TRACKER).write_text("100\n")
    assert find_checkpoint(tmp_path, facts_of()).iteration == 100
    (tmp_path / TRACKER).unlink()
    assert find_checkpoint(tmp_path, facts_of()).iteration == 200


def test_incomplete_folder_is_passed_over_with_a_note(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 100)
    damaged = write_checkpoint(tmp_path, 200)
    (damaged / "mp_rank_01_000" / STATE_FILE).unlink()
    (tmp_path / TRACKER).write_text("200\n")
    found = find_checkpoint(tmp_path, facts_of())
    assert found.iteration == 100
    assert found.notes[0].startswith("iter_0000200 is incomplete (mp_rank_01_000")


def test_no_checkpoint_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --resume out to start anew"):
        find_checkpoint(tmp_path, facts_of())


def test_other_shape_is_refused_and_other_course_noted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 100)
    with pytest.raises(UsageError, match="with hidden_size 256, but this run has 128"):
        find_checkpoint(tmp_path, facts_of("--hidden-size", "128"))
    found = find_checkpoint(tmp_path, facts_of("--lr", "0.01"))
    assert found.notes == (
        "lr differs from the checkpoint's (0.002, now 0.01): losses will differ too",
    )


def test_two_newest_are_kept(tmp_path: Path) -> None:
    for iteration in (100, 200, 300, 900):
        write_checkpoint(tmp_path, iteration)
    write_checkpoint(tmp_path, 150, ".iter_0000150.partial")
    _prune(tmp_path, 300)
    # 900 belongs to a course that was abandoned by resuming from an older checkpoint.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000200", "iter_0000300"]


def test_metrics_beyond_the_resumed_iteration_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, keep_until=0)
    for iteration in range(1, 6):
        log.append({"iteration": iteration, "lm_loss": 1.0 / iteration})
    with path.open("a") as file:
        file.write('{"iteration": 6, "lm_')  # cut off by a kill
    assert len(read_metrics(path)) == 5
    MetricsLog(path, keep_until=3).append({"iteration": 4, "lm_loss": 0.5})
    assert [entry["iteration"] for entry in read_metrics(path)] == [1, 2, 3, 4]


def test_picture_shows_training_and_validation(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="the picture is optional")
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, keep_until=0)
    log.append({"iteration": 1, "lm_loss": 5.0})
    log.append({"iteration": 1, "validation_loss": 5.0})
    assert plot_loss(path, tmp_path / "loss.png") is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_damaged_facts_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    for content, words in (
        (b"{", "run.json cannot be read"),
        (b"[1]", "it holds list"),
        (b"\xff", "run.json cannot be read"),
        (b"[" * 100_000, "run.json cannot be read"),
    ):
        (folder / "run.json").write_bytes(content)
        with pytest.raises(UsageError, match=words):
            find_checkpoint(tmp_path, facts_of())
    (folder / "run.json").write_text('{"tensor_model_parallel_size": "many"}')
    with pytest.raises(UsageError, match="there is no complete checkpoint"):
        find_checkpoint(tmp_path, facts_of())


def test_folders_of_other_names_are_passed_over(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    write_checkpoint(tmp_path, 9).rename(tmp_path / "iter_of_mine")
    assert find_checkpoint(tmp_path, facts_of()).folder == folder


class Executed:
    """What pickle would run while it reads."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_a_file_that_is_no_state_is_refused_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = FoundCheckpoint(write_checkpoint(tmp_path, 3), 3, ())
    path = found.folder / "mp_rank_00_000" / "model_optim.pt"
    torch.save({"state": Executed()}, path)
    whole = path.read_bytes()
    for content in (whole, whole[:100], b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model_optim\.pt cannot be read: "):
            load_state(found, 0, 0)
    assert not (tmp_path / "executed").exists()


def test_metrics_on_a_full_disk_end_with_a_word_and_stay_readable(
    small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk(8) / "metrics.jsonl"
    log = MetricsLog(path, keep_until=0)
    for iteration in range(1000):
        log.append({"iteration": iteration, "lm_loss": 1.0})
    assert capsys.readouterr().err.count("cannot be written any more: No space left") == 1
    entries = read_metrics(path)
    assert [entry["iteration"] for entry in entries] == list(range(len(entries)))
    assert 50 < len(entries) < 1000
    assert "was not drawn: No space left" in (plot_loss(path, path.with_name("loss.png")) or "")
