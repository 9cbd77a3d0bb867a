"""The stand-ins for what Megatron hardwires to CUDA: what they do, and that they are undone."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from scripts.cpu_pretraining.megatron_on_cpu import (
    REPLACEMENTS,
    cuda_means_cpu,
    megatron_on_cpu,
)

ABSENT = object()


def test_every_replacement_is_undone_and_has_a_reason() -> None:
    def current() -> list[object]:
        return [getattr(import_module(r.module), r.attribute, ABSENT) for r in REPLACEMENTS]

    before = current()
    with megatron_on_cpu():
        assert current() == [r.stand_in for r in REPLACEMENTS]
        assert torch.cuda.current_device() == torch.device("cpu")
    after = current()
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(r.reason for r in REPLACEMENTS)


def test_cuda_means_cpu_inside_the_block_only() -> None:
    tensor = torch.ones(2)
    with cuda_means_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1, device=torch.device("cuda", 0)).device.type == "cpu"
        assert tensor.cuda() is tensor
        assert tensor.to("cuda").device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.int32).dtype == torch.int32
    assert tensor.type() == "torch.FloatTensor"
