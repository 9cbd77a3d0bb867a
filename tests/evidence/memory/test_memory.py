"""What fused ops need beside their plain forms, in bytes that torch allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from commfuse_npu.tools.bench.peak_memory import peak_bytes
from scripts.evidence import memory


def test_the_peak_is_of_what_lives_at_once() -> None:
    def call() -> None:
        one = torch.ones(1 << 18)  # 1 MiB
        del one
        two, three = torch.ones(1 << 18), torch.ones(1 << 19)
        del two, three

    assert 3 << 20 <= peak_bytes(call, "cpu") < (3 << 20) + 4096


def extra_blocks(rank: int) -> dict[str, float]:
    return {row.op: row.extra_blocks for row in memory.measure(512, 128, 4, 1)}


def test_fused_attention_needs_no_more_than_two_blocks_above_the_plain_one(ranks) -> None:
    for extra in ranks(2).run(extra_blocks):
        for op in ("attention_linear_reduce_scatter", "attention_all_to_all"):
            assert extra[op] < 0, extra  # the scores of a block of queries instead of all
            assert extra[f"{op}, no scores"] <= 2, extra


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    shape = ["--sequence", "64", "--hidden", "32", "--heads", "4"]
    assert memory.main([*shape, "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
    assert [row["op"] for row in rows[:2]] == ["all_gather_linear", "linear_reduce_scatter"]
    assert all(row["extra_blocks"] == (row["fused"] - row["plain"]) / row["block"] for row in rows)
