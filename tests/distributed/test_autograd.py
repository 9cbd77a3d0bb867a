"""What torch's autograd and autocast expect of every op, on real gloo processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from commfuse_npu import ops
from tests.random_networks.case import OPS, one_layer
from tests.random_networks.compare import differences, run_case
from tests.random_networks.network_run import Call, input_of
from tests.random_networks.values import drawn

WEIGHTED = [op for op in OPS if op != "attention_all_to_all"]


def leaves_of(call: Call, x: torch.Tensor) -> list[torch.Tensor]:
    found = (x, call.weight, call.bias)
    return [one for one in found if one is not None and one.requires_grad]


def twice(rank: int, op: str) -> None:
    """A second backward over a graph that is kept gives the same; over another, an error."""
    for x_grad, weight_grad in ((True, True), (False, True), (True, False)):
        if op == "attention_all_to_all" and not x_grad:
            continue  # it has no weight
        bias = "trained" if weight_grad else "no"
        case = one_layer(op, 2, x_grad=x_grad, weight_grad=weight_grad, bias=bias)
        call, x = Call(case), input_of(case)
        leaves = leaves_of(call, x)
        y = call(x)
        grad = drawn(1, f"gradient {rank}", tuple(y.shape), y.dtype, rounded=True)
        first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        second = torch.autograd.grad(y, leaves, grad)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other), case
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, leaves, grad)


def changed_weight(rank: int, op: str) -> None:
    """A weight that the optimizer changed before the backward is noticed, on every rank."""
    case = one_layer(op, 2)
    call, x = Call(case), input_of(case)
    y = call(x)
    assert call.weight is not None
    with torch.no_grad():
        call.weight.mul_(2)
    with pytest.raises(RuntimeError, match="the weight was modified in place"):
        y.backward(torch.ones_like(y))
    assert not differences(run_case(case, "fused"), run_case(case, "plain"))


def without_gradients(rank: int, op: str) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        case = one_layer(op, 2, keep_gathered=True)
        with mode():
            ours, plain = (Call(case, 0, form)(input_of(case)) for form in ("fused", "plain"))
        assert not ours.requires_grad
        assert torch.equal(ours, plain)


def under_autocast(rank: int, op: str) -> None:
    """fp32 tensors, computed in bf16 as torch does it; gradients in the dtype of their tensors."""
    case = one_layer(op, 2)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = (run_case(case, form) for form in ("fused", "plain"))
    assert not differences(ours, plain)
    low = run_case(replace(case, dtype=torch.bfloat16), "fused")
    for name, value in ours.items():
        if value is not None:
            assert value.dtype == (torch.bfloat16 if name.endswith(" y") else torch.float32)
            assert torch.equal(value, low[name].to(value.dtype)), f"{op}: {name}, not of bf16"


def flagged(rank: int, op: str) -> None:
    """Megatron's flags on a weight whose gradient goes to main_grad."""
    for zeros, wgrad in product((False, True), ("whole", "blocks")):
        case = one_layer(op, 2, main_grad=torch.float32, flag=True, wgrad=wgrad)
        call, x = Call(case), input_of(case)
        weight: Any = call.weight
        weight.zero_out_wgrad = zeros
        before = weight.main_grad.clone()
        y = call(x)
        y.backward(torch.ones_like(y))
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape
        assert not zeros or not weight.grad.any()
        assert not torch.equal(before, weight.main_grad)


def no_main_grad(rank: int, op: str) -> None:
    case = one_layer(op, 2, main_grad=torch.float32)
    call = Call(case)
    del call.weight.main_grad  # type: ignore[union-attr]
    y = call(input_of(case))
    with pytest.raises(RuntimeError, match=r"needs weight\.main_grad"):
        y.backward(torch.ones_like(y))


def mistaken(rank: int, op: str) -> None:
    """A group in the place of a transport, and a mapping in that of options."""
    call = Call(one_layer(op, 2))
    x = input_of(call.case)
    keywords = {"transport": call.link, "options": call.keywords["options"]}
    call.keywords = keywords | {"transport": call.link.group}
    with pytest.raises(TypeError, match=rf"{op}: transport is a ProcessGroup.*; pass what Trans"):
        call(x)
    call.keywords = keywords | {"options": {"chunks": 2}}
    with pytest.raises(TypeError, match=rf"{op}: options is a dict; pass LinearOptions\("):
        call(x)


MAIN_GRAD = [op for op in WEIGHTED if op != "sharded_linear"]
CHECKS: dict[Callable[[int, str], None], Any] = {
    twice: OPS,
    changed_weight: WEIGHTED,
    without_gradients: OPS,
    under_autocast: OPS,
    flagged: MAIN_GRAD,
    no_main_grad: MAIN_GRAD,
    mistaken: ("all_gather_linear", "linear_reduce_scatter"),
}


def every_op(rank: int, check: Callable[[int, str], None]) -> None:
    for op in CHECKS[check]:
        check(rank, op)


@pytest.mark.parametrize("check", CHECKS)
def test_every_op(ranks, check: Callable[[int, str], None]) -> None:
    ranks(2).run(every_op, check)


def test_every_op_on_activations_is_here() -> None:
    functions = {name: getattr(ops, name) for name in ops.__all__}
    takes = {
        name: inspect.signature(one).parameters
        for name, one in functions.items()
        if inspect.isfunction(one)
    }
    assert {name for name, of in takes.items() if {"x", "q"} & set(of)} == set(OPS)


@pytest.mark.parametrize(
    "take",
    [
        ops.Buckets,
        lambda given: ops.shard_linears(torch.nn.Linear(4, 4), transport=given),
        lambda given: ops.ShardedLinear.from_linear(torch.nn.Linear(4, 4), transport=given),
    ],
)
def test_a_group_is_not_taken_for_a_transport(take: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"transport is a str; pass what Transport\.create"):
        take("a group")
