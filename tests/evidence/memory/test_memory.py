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


def layer_that_flows(rank: int) -> list[memory.Memory]:
    return memory.measure_layer(512, 128, 4, 4)


def test_a_layer_that_flows_saves_shards_and_what_is_its_own(ranks) -> None:
    for found in ranks(2).run(layer_that_flows):
        megatron, chunks = (row for row in found if "no scores" not in row.op)
        assert "Megatron" in megatron.op
        assert megatron.fused_saved is not None
        # Blocks of [s, H]: two normed shards, q, k, v, attended, the sum after attention, the
        # output; gate and up, silu(gate) and its product, each 7 / 2 as wide as the hidden states.
        wanted = (2 + 3 + 1 + 1 + 1 + 4 * 7 / 2) * megatron.block
        # Beyond that the statistics of softmax and norms.
        assert wanted <= megatron.fused_saved < wanted + 0.25 * megatron.block
        assert chunks.fused_saved == megatron.fused_saved
        assert megatron.plain_saved is not None
        assert chunks.plain_saved is not None
        assert megatron.fused_saved <= megatron.plain_saved + 0.25 * megatron.block
        # Two gathered inputs of two blocks each in place of shards.
        assert chunks.plain_saved - megatron.fused_saved >= 1.75 * megatron.block
        assert megatron.fused <= megatron.plain


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    shape = ["--sequence", "64", "--hidden", "32", "--heads", "4"]
    assert memory.main([*shape, "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
    assert [row["op"] for row in rows[:2]] == ["all_gather_linear", "linear_reduce_scatter"]
    assert all(row["extra_blocks"] == (row["fused"] - row["plain"]) / row["block"] for row in rows)
