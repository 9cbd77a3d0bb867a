"""Every op follows the rules of torch's autograd and autocast, on real gloo processes."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import TensorWeakRef

from tests.distributed.ranks import on_ranks
from tests.random_networks.case import OPS, one_layer
from tests.random_networks.compare import complaints, differences, run_case
from tests.random_networks.network_run import Call, input_of
from tests.random_networks.values import drawn

WEIGHTED = [op for op in OPS if op != "attention_all_to_all"]


def twice(rank: int, op: str) -> None:
    """A second backward over a retained graph gives the same gradients; a third one raises."""
    for x_grad, weight_grad in ((True, True), (False, True), (True, False)):
        if op == "attention_all_to_all" and not x_grad:
            continue  # it has no weight
        bias = "trained" if weight_grad else "no"
        case = one_layer(op, 2, x_grad=x_grad, weight_grad=weight_grad, bias=bias)
        call, x = Call(case), input_of(case)
        leaves = [tensor for tensor in (x, call.weight, call.bias) if tensor is not None]
        leaves = [tensor for tensor in leaves if tensor.requires_grad]
        y = call(x)
        grad = drawn(1, f"gradient {rank}", tuple(y.shape), y.dtype, rounded=True)
        first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        second = torch.autograd.grad(y, leaves, grad)
        for expected, repeated in zip(first, second, strict=True):
            assert torch.equal(expected, repeated), case
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, leaves, grad)


def changed_weight(rank: int, op: str) -> None:
    """Every rank raises if a weight was modified in place between forward and backward."""
    case = one_layer(op, 2)
    call, x = Call(case), input_of(case)
    y = call(x)
    assert call.weight is not None
    with torch.no_grad():
        call.weight.mul_(2)
    with pytest.raises(RuntimeError, match="the weight was modified in place"):
        y.backward(torch.ones_like(y))
    assert not complaints(rank, case)


def swapped(rank: int, op: str) -> None:
    """What hooks move elsewhere, as activation swapping does, is kept nowhere else."""
    case, saved = one_layer(op, 2), list[TensorWeakRef]()
    call, x = Call(case), input_of(case)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(TensorWeakRef(tensor))
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(x)
    kept = [tensor for tensor in (ref() for ref in saved) if tensor is not None]
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in kept), op
    (grad,), (expected,) = (torch.autograd.grad(z.sum(), x) for z in (y, call(x)))
    assert torch.equal(grad, expected)


def under_autocast(rank: int, op: str) -> None:
    """fp32 tensors are computed in bf16, as by torch; gradients have the dtype of their tensors."""
    case = one_layer(op, 2)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run_case(case, "fused")
    low = run_case(replace(case, dtype=torch.bfloat16), "fused")
    for name, value in ours.items():
        if value is not None:
            assert value.dtype == (torch.bfloat16 if name.endswith(" y") else torch.float32)
            assert torch.equal(value, low[name].to(value.dtype)), f"{op}: {name}, not of bf16"


def backward_under_autocast(rank: int, op: str) -> None:
    """Gradients are those of a backward outside of autocast, wherever the forward ran."""
    case = one_layer(op, 2)
    for forward in (False, True):
        found: list[dict[str, torch.Tensor | None]] = []
        for backward in (False, True):
            call, x = Call(case), input_of(case)
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                y = call(x)
            grad = drawn(1, f"gradient {rank}", tuple(y.shape), y.dtype, rounded=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                # In this thread: in that of tests.distributed.backward_thread autocast is off.
                inspect.unwrap(torch.autograd.backward)(y, grad)
            found.append({"x": x.grad, **call.gradients()})
        assert not differences(*found), op


def changed_in_place(rank: int, op: str) -> None:
    """``y += residual`` and ``relu_`` of a result give the gradients of ``relu(y + residual)``."""
    case = one_layer(op, 2)
    found = []
    for in_place in (False, True):
        call, x = Call(case), input_of(case)
        y = call(x)
        residual = drawn(2, f"residual {rank}", tuple(y.shape), y.dtype, rounded=False)
        if in_place:
            y += residual
            y.relu_()
        else:
            y = torch.relu(y + residual)
        y.square().sum().backward()
        found.append({"x": x.grad, **call.gradients()})
    assert not differences(*found), op


CHECKS: dict[Callable[[int, str], None], Any] = {
    twice: OPS,
    changed_weight: WEIGHTED,
    swapped: OPS,
    under_autocast: OPS,
    backward_under_autocast: OPS,
    changed_in_place: OPS,
}


@pytest.mark.parametrize("check", CHECKS)
@on_ranks(2)
def test_every_op(rank: int, check: Callable[[int, str], None]) -> None:
    for op in CHECKS[check]:
        check(rank, op)
