"""What fused ops need beside their plain forms, in bytes that torch allocated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from commfuse_npu.tools.bench.peak_memory import peak_bytes

ROOT = Path(__file__).resolve().parents[3]


def test_the_peak_is_of_what_lives_at_once() -> None:
    def call() -> None:
        one = torch.ones(1 << 18)  # 1 MiB
        del one
        two, three = torch.ones(1 << 18), torch.ones(1 << 19)
        del two, three

    assert 3 << 20 <= peak_bytes(call, "cpu") < (3 << 20) + 4096


def test_fused_attention_needs_no_more_than_two_blocks_above_the_plain_one(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    shape = ("--sequence", "512", "--hidden", "128", "--heads", "4")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.evidence", "memory", *shape, "--json", str(file)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    extra = {row["op"]: row["extra_blocks"] for row in json.loads(file.read_text("utf-8"))}
    for op in ("attention_linear_reduce_scatter", "attention_all_to_all"):
        assert extra[op] < 0, done.stdout  # the scores of a block of queries instead of all
        assert extra[f"{op}, no scores"] <= 2, done.stdout
