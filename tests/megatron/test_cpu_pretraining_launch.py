"""The launcher: how many ranks, and exit codes without torchrun's traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

ROOT = Path(__file__).resolve().parents[2]


def launch(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.cpu_pretraining.launch", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_mistake_is_answered_before_any_rank_starts() -> None:
    run = launch("--seq-length", "255")
    assert run.returncode == 2
    assert run.stderr.splitlines() == [
        "cpu_pretraining: error: sequence length 255 is not divisible by the tensor-parallel size "
        "2; choose --seq-length 254 or 256"
    ]


def test_the_exit_code_is_that_of_the_run(tmp_path) -> None:
    run = launch("--resume", "--runs-dir", str(tmp_path))
    assert run.returncode == 2
    assert "there is no complete checkpoint in" in run.stderr
    assert "ended with exit code 2; its own message is above" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 2)])
def test_as_many_ranks_as_the_layout_needs(tmp_path, tp: int, dp: int) -> None:
    run = launch(
        *f"--tensor-model-parallel-size {tp} --data-parallel-size {dp} --num-layers 1 --fp32 "
        "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
        "--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 "
        "--eval-interval 0 --save-interval 0".split(),
        *("--runs-dir", str(tmp_path)),
    )
    assert run.returncode == 0, run.stderr
    assert " iteration        2/       2 | consumed samples:            8 |" in run.stdout
    folders = list(tmp_path.glob("llama_tiny/checkpoints/iter_0000002/mp_rank_*"))
    assert len(folders) == tp * dp
