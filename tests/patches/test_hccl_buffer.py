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


@pytest.mark.parametrize(
    ("change", "megabytes"),
    [
        ({}, 16),  # 8 MB
        ({"micro_batch_size": 4}, 32),
        ({"micro_batch_size": 5}, 64),  # 40 MB
        ({"tensor_model_parallel_size": 2, "bf16": False}, 64),
        ({"micro_batch_size": 4, "context_parallel_size": 2}, 16),
        ({"micro_batch_size": 100}, 200),
    ],
)
def test_lanes_are_sized_to_their_messages(change, megabytes: int) -> None:
    args = argparse.Namespace(**{**LLAMA3_8B, **change})
    assert of_blocks(args) == megabytes


def test_no_size_without_a_shape() -> None:
    assert of_blocks(argparse.Namespace(seq_length=8192)) is None


def test_lanes_of_heads_and_buckets_are_sized_to_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    context = {"micro_batch_size": 16, "context_parallel_size": 2}
    assert of_heads(argparse.Namespace(**{**LLAMA3_8B, **context})) == 32
    assert of_heads(argparse.Namespace(seq_length=8192)) is None
    args = argparse.Namespace(**LLAMA3_8B, overlap_grad_reduce=True)
    assert of_buckets(args) == 32, "40 million fp32 gradients over 8 ranks are 19 MiB"
    args.ddp_bucket_size = 400_000_000
    assert of_buckets(args) == 200
    args.overlap_grad_reduce = False
    assert of_buckets(args) is None, "all gradients are one bucket"
