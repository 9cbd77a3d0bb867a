"""All device names refer to the CPU while the mode is active."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_patches.rehearsal.devices import DevicesAreTheCpu, _in_mode, on_cpu


def test_names_of_devices_and_other_values() -> None:
    assert [on_cpu(name) for name in ("npu", "npu:3", "cuda", "cuda:0")] == ["cpu"] * 4
    values = ["cpu", "meta", "cuda_graph", "SBH", 0, None]
    assert list(map(on_cpu, values)) == values


def test_tensors_are_made_and_stay_on_the_cpu() -> None:
    tensor = torch.ones(2)
    with DevicesAreTheCpu():
        tensors = [
            torch.zeros(2, device="cuda"),
            torch.zeros(2, device=torch.device("cuda", 1)),
            torch.tensor([1.0], device=0),
            tensor.to("cuda:0"),
            tensor.to(0),
            tensor.to(device="cuda", dtype=torch.bfloat16),
            tensor.new_empty(3, device="cuda"),
            torch.ones(2, pin_memory=True),
            torch.nn.Linear(2, 2).cuda().weight,
        ]
        meta = torch.ones(2, device="meta")
        assert tensor.cuda() is tensor
        assert tensor.pin_memory() is tensor
    assert {x.device.type for x in tensors} == {"cpu"}
    assert tensors[5].dtype == torch.bfloat16
    assert meta.device.type == "meta"


def test_types_are_those_of_a_device_and_integers_are_counted() -> None:
    with DevicesAreTheCpu():
        counts = torch.histc(torch.tensor([0, 2, 2], dtype=torch.int32), bins=3, min=0, max=3)
        assert (counts.dtype, counts.tolist()) == (torch.int32, [1, 0, 2])
        assert torch.ones(1).type() == "torch.npu.FloatTensor"
    assert torch.ones(1).type() == "torch.FloatTensor"


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_backward_runs_sees_it_too(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    graph: Any = torch.autograd.graph
    wrapped = _in_mode(graph._engine_run_backward)
    monkeypatch.setattr(graph, "_engine_run_backward", wrapped)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", wrapped)
    with DevicesAreTheCpu():
        x = torch.ones(2, requires_grad=True)
        y = checkpoint(lambda x: x * torch.ones(2, device="cuda"), x, use_reentrant=reentrant)
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]
