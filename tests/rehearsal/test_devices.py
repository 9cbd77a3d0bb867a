"""Device names mean the CPU while the mode is entered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_patches.rehearsal.devices import DevicesAreTheCpu, _in_mode, on_cpu


@pytest.mark.parametrize("name", ["npu", "npu:3", "cuda", "cuda:0"])
def test_names(name: str) -> None:
    assert on_cpu(name) == "cpu"


@pytest.mark.parametrize("value", ["cpu", "meta", "cuda_graph", "SBH", 0, None])
def test_other_values_stay(value: object) -> None:
    assert on_cpu(value) == value


def test_torch_allocates_on_the_cpu() -> None:
    with DevicesAreTheCpu():
        tensors = [
            torch.zeros(2, device="cuda"),
            torch.zeros(2, device=torch.device("cuda", 1)),
            torch.tensor([1.0], device=0),
            torch.ones(2).to("cuda:0"),
            torch.ones(2).to(0),
            torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
            torch.ones(2).new_empty(3, device="cuda"),
            torch.ones(2, pin_memory=True),
        ]
        meta = torch.ones(2, device="meta")
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert tensors[5].dtype == torch.bfloat16
    assert meta.device.type == "meta"


def test_moving_is_the_identity() -> None:
    tensor = torch.ones(2)
    with DevicesAreTheCpu():
        assert tensor.cuda() is tensor
        assert tensor.pin_memory() is tensor
        assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"


def test_types_are_those_of_a_device() -> None:
    with DevicesAreTheCpu():
        assert torch.ones(1).type() == "torch.npu.FloatTensor"
        assert torch.ones(1).type("torch.npu.HalfTensor").dtype == torch.float16
    with DevicesAreTheCpu("cuda"):
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type() == "torch.FloatTensor"


def _allocate_on_the_device(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones(2, device="cuda")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_backward_runs_sees_it_too(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    graph: Any = torch.autograd.graph
    wrapped = _in_mode(graph._engine_run_backward)
    monkeypatch.setattr(graph, "_engine_run_backward", wrapped)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", wrapped)
    with DevicesAreTheCpu():
        x = torch.ones(2, requires_grad=True)
        y = checkpoint(_allocate_on_the_device, x, use_reentrant=reentrant)
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


def test_whole_numbers_are_counted() -> None:
    with DevicesAreTheCpu():
        counts = torch.histc(torch.tensor([0, 2, 2], dtype=torch.int32), bins=3, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 0, 2]
