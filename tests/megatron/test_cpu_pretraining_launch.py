"""The launcher: how many ranks, and exit codes without torchrun's traceback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from scripts.cpu_pretraining import launch
from scripts.cpu_pretraining.usage_error import UsageError, say_error
from tests.limits import LIMIT
from tests.megatron.in_ranks import TINY, losses, pretrained


def test_a_mistake_is_answered_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(launch, "torchrun", lambda words: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        launch.main(["--seq-length", "255"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "cpu_pretraining: error: sequence length 255 is not divisible by the tensor-parallel size "
        "2; choose --seq-length 254 or 256"
    ]


@pytest.mark.parametrize(("tp", "cp", "dp"), [(1, 1, 1), (2, 2, 3)])
def test_as_many_ranks_as_the_layout_needs(
    monkeypatch: pytest.MonkeyPatch, tp: int, cp: int, dp: int
) -> None:
    started: list[str] = []
    monkeypatch.setattr(launch, "torchrun", started.extend)
    layout = f"--tensor-model-parallel-size {tp} --context-parallel-size {cp} "
    layout += f"--data-parallel-size {dp} --global-batch-size 12"
    assert launch.main(layout.split()) == 0
    assert started[started.index("--nproc_per_node") + 1] == str(tp * cp * dp)
    assert started[-len(layout.split()) :] == layout.split()


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (ChildFailedError("run", {1: ProcessFailure(1, 0, 2, "")}), 2),
        (ChildFailedError("run", {1: ProcessFailure(1, 0, -9, "")}), 137),
        (SignalException("stopped", signal.SIGINT), 130),
    ],
)
def test_the_exit_code_is_that_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, ended: Exception, code: int
) -> None:
    def torchrun(words: list[str]) -> None:
        raise ended

    monkeypatch.setattr(launch, "torchrun", torchrun)
    assert launch.main([]) == code
    said = "rank 1 ended with exit code" if isinstance(ended, ChildFailedError) else ""
    assert said in capsys.readouterr().err


def test_the_error_of_a_rank_is_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "error.json"

    def torchrun(words: list[str]) -> None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        say_error(UsageError("the reason; the way out"))
        print("what torchrun says then", file=sys.stderr)
        raise ChildFailedError("run", {1: ProcessFailure(1, 0, 2, str(file))})

    monkeypatch.setattr(launch, "torchrun", torchrun)
    assert launch.main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == lines[-1] == "cpu_pretraining: error: the reason; the way out"


def start(runs: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "scripts.cpu_pretraining.launch", *TINY.split()),
            *("--runs-dir", str(runs), *options),
        ],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_a_comparison_from_the_command_line(tmp_path: Path) -> None:
    with start(tmp_path, "--compare", "--train-iters", "2", "--eval-interval", "0") as process:
        said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, said
    assert "identical: True" in said.splitlines()


@pytest.mark.long
def test_ctrl_c_saves_and_answers_130(tmp_path: Path) -> None:
    with start(tmp_path, "--train-iters", "100000", "--save-interval", "0") as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if " iteration        2/" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130, said
    assert "give the same command with --resume to go on" in said
    assert "Traceback" not in said
    assert list(tmp_path.glob("llama_tiny/checkpoints/iter_*/mp_rank_01_000/model_optim.pt"))


@pytest.mark.long
def test_ranks_go_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, "--train-iters", "100000", "--save-interval", "0") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " iteration        2/" in line:
                process.kill()
                break
        # It ends when nobody holds it any more.
        process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGKILL


def rank_of(launcher: int, rank: int) -> int:
    """The id of the process that is this rank (Linux)."""
    for file in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    raise AssertionError(f"{launcher} has no rank {rank}")


@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_launch_and_the_training_goes_on(
    ranks, tmp_path: Path
) -> None:
    options = ("--train-iters", "30", "--eval-interval", "0", "--data-path", str(Path(__file__)))
    whole = pretrained(ranks(2), tmp_path, *options, "--name", "whole")
    said = ""
    with start(tmp_path, *options, "--name", "killed") as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if " iteration        7/" in line:
                os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    assert process.returncode == 137, said
    assert re.search(r"^\[rank0\]: .*Error: ", said, re.M), said
    resumed = pretrained(ranks(2), tmp_path, *options, "--name", "killed", "--resume")
    assert "resuming from" in resumed.out
    assert resumed.weights == whole.weights
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
