"""Fused linear layers: rows of any number, orders of sums, memory, on real gloo processes.

Their bits are compared in :mod:`tests.random_networks`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from commfuse_npu.ops import LinearOptions, linear
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import correct, transport
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.random_networks import formulas
from tests.random_networks.case import one_layer
from tests.random_networks.network_run import Call, input_of, run_network
from tests.random_networks.values import drawn

LINEARS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "sharded_linear")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("size", [2, 3])
def test_bits_and_distance_from_fp64(ranks, size: int) -> None:
    cases = [
        one_layer(op, size, dtype=dtype, wgrad=wgrad)
        for op, dtype, wgrad in product(LINEARS, DTYPES, ("whole", "blocks"))
        if op != "sharded_linear" or wgrad == "whole"
    ]
    cases += [
        one_layer(op, size, dtype=torch.bfloat16, main_grad=torch.float32, wgrad=wgrad)
        for op, wgrad in product(LINEARS[:3], ("whole", "blocks"))
    ]
    ranks(size).run(correct, cases)


def contiguous_views(rank: int) -> None:
    """``Tensor.view`` as MindSpeed has it: of what is not contiguous, that of a copy."""
    view, chunked = torch.Tensor.view, Schedule(chunks=3)
    for op, schedule in product(LINEARS[:3], (chunked, replace(chunked, shape="collective"))):
        case = one_layer(op, 4, dtype=torch.float32, wgrad="blocks")
        layer = replace(case.layers[0], schedule=schedule)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "view", lambda x, *shape: view(x.contiguous(), *shape))
            correct(rank, [replace(case, layers=(layer,))])


def test_views_may_be_copies(ranks) -> None:
    ranks(4).run(contiguous_views)


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks()
def test_all_reduce_takes_any_number_of_rows(rank: int) -> None:
    """Rows that do not divide by the group size, fewer rows than ranks, none at all."""
    shapes = ("shifted", "collective")
    for rows, chunks, shape in product((1, 2, 5, 7, 11, 0), (1, 2, 4), shapes):
        options = LinearOptions(Schedule(shape, chunks=chunks))
        results = []
        for form in ("fused", "formula"):
            x = drawn(rank, "x", (rows, 2, 32), torch.float32).requires_grad_()
            weight = drawn(rank, "weight", (32, 32), torch.float32).requires_grad_()
            if form == "fused":
                y = linear.linear_all_reduce(x, weight, transport=transport(), options=options)
            else:
                group = transport().group
                y = formulas.linear_all_reduce(x, weight, group=group, options=options)
            y.backward(drawn(1, "gradient", tuple(y.shape), y.dtype))
            results.append((y.detach(), x.grad, weight.grad))
        for ours, exact in zip(*results, strict=True):
            assert torch.equal(ours, exact), (rows, chunks, shape)


@on_ranks(2)
def test_training_after_inference(rank: int) -> None:
    """Buffers that were allocated in inference mode serve a training afterwards."""
    link = Transport.create(timeout=PATIENT)
    x, weight = torch.ones(4, 32), torch.ones(32, 32, requires_grad=True)
    for _ in range(2):
        with torch.inference_mode():
            linear.linear_reduce_scatter(x, weight, transport=link)
        linear.linear_reduce_scatter(x, weight, transport=link).sum().backward()


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("linear_reduce_scatter", "micro-batch 0, layer 0 y"),
        ("sharded_linear", "layer 0 weight.grad"),
    ],
)
@on_ranks(4)
def test_reduce_dtype_rounds_once(rank: int, op: str, name: str) -> None:
    """Mean errors of what is summed over the ranks, in the dtype and in fp32."""
    errors = []
    for wide in (False, True):
        case = one_layer(op, 4, dtype=torch.bfloat16, bias="no", wide=wide, rows=16, batch=1)
        ours, exact = (run_network(case, form)[name] for form in ("fused", "exact"))
        errors.append((ours - exact).pow(2).mean().sqrt().item())
    assert errors[1] < errors[0]


@on_ranks(3)
def test_buffers_are_used_again(rank: int) -> None:
    link, case = transport(), one_layer("all_gather_linear", transport().size)

    def several() -> int:
        for _ in range(3):
            y = Call(case, link=link)(input_of(case, link=link))
            y.backward(torch.ones_like(y))
        return link.scratch.idle_bytes

    idle = several()
    assert several() == idle, "buffers are not used again"
    assert not link._in_flight
