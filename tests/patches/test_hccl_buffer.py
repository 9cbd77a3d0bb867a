"""The lanes' part of ``--hccl-group-buffer``."""

from __future__ import annotations

import argparse

import pytest

from mindspeed_patches.hccl_buffer import of_blocks, of_buckets, of_heads, take_lane_megabytes


@pytest.mark.parametrize(
    ("given", "megabytes", "left"),
    [
        ("commfuse:64", 64, None),
        ("tp:400;commfuse: 64;dp:100", 64, "tp:400;dp:100"),
        ("tp:400,commfuse:32", 32, "tp:400"),
        ("tp:400;dp:100", None, "tp:400;dp:100"),
        (None, None, None),
    ],
)
def test_the_lanes_part_is_taken_out(
    given: str | None, megabytes: int | None, left: str | None
) -> None:
    args = argparse.Namespace(hccl_group_buffer=given)
    assert take_lane_megabytes(args) == megabytes
    assert args.hccl_group_buffer == left


def test_a_mindspeed_without_the_option() -> None:
    assert take_lane_megabytes(argparse.Namespace()) is None


@pytest.mark.parametrize("size", ["0", "-1", "much", "", "1.5"])
def test_a_senseless_size(size: str) -> None:
    args = argparse.Namespace(hccl_group_buffer=f"tp:1;commfuse:{size}")
    with pytest.raises(ValueError, match=r"--hccl-group-buffer commfuse:.*whole number from 1"):
        take_lane_megabytes(args)


LLAMA3_8B = {
    "seq_length": 8192,
    "micro_batch_size": 1,
    "hidden_size": 4096,
    "tensor_model_parallel_size": 8,
    "context_parallel_size": 1,
    "bf16": True,
}


CONTEXT = {"micro_batch_size": 16, "context_parallel_size": 2}
OVERLAPPED = {"overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("message", "change", "megabytes"),
    [
        (of_blocks, {}, 16),  # 8 MB
        (of_blocks, {"micro_batch_size": 4}, 32),
        (of_blocks, {"micro_batch_size": 5}, 64),  # 40 MB
        (of_blocks, {"tensor_model_parallel_size": 2, "bf16": False}, 64),
        (of_blocks, {"tensor_model_parallel_size": 2, "bf16": False, "fp16": True}, 32),
        (of_blocks, {"micro_batch_size": 4, "context_parallel_size": 2}, 16),
        (of_blocks, {"micro_batch_size": 100}, 200),
        (of_blocks, {"hidden_size": None}, None),
        (of_blocks, {"seq_length": None}, None),
        (of_heads, CONTEXT, 32),
        (of_heads, {**CONTEXT, "hidden_size": None}, None),
        (of_buckets, OVERLAPPED, 32),  # 40 million fp32 gradients over 8 ranks are 19 MiB
        (of_buckets, {**OVERLAPPED, "ddp_bucket_size": 400_000_000}, 200),
        (of_buckets, {**OVERLAPPED, "pipeline_model_parallel_size": 2}, 64),
        (of_buckets, {**OVERLAPPED, "tensor_model_parallel_size": 64}, None),
        (of_buckets, {}, None),  # all gradients are one bucket
    ],
)
def test_lanes_are_sized_to_their_messages(monkeypatch, message, change, megabytes) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert message(argparse.Namespace(**{**LLAMA3_8B, **change})) == megabytes
