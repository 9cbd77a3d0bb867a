"""Every op in one layer, compared with the plain form bit for bit and with fp64, on gloo processes.

Random networks (:mod:`tests.random_networks`) are compared bit for bit only.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from commfuse_npu import ops
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from tests.attention_masks import MASKS
from tests.distributed.programs import correct, transport
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import HEAD_FEATURES, WITH_PROJECTION, Network, one_layer
from tests.random_networks.compare import run_case
from tests.random_networks.network_run import run_network
from tests.random_networks.values import drawn

ULYSSES = (
    *("linear_all_to_all", "attention_all_to_all"),
    *("all_to_all_linear", WITH_PROJECTION),
)
SPLIT = "attention_linear_reduce_scatter"
LINEARS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "sharded_linear")
LOW = (torch.bfloat16, torch.float16)


def whole_layer(size: int, last: str = ULYSSES[3], **changes: Any) -> Network:
    """A projection to heads, followed by the layer ``last``."""
    first = one_layer(ULYSSES[0], size, schedule=Schedule(lanes=1, chunks=3))
    return replace(first, layers=(first.layers[0], one_layer(last, size).layers[0]), **changes)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_linear_layers(rank: int) -> None:
    size = transport().size
    combinations = product(LINEARS, (torch.float32, *LOW), ("whole", "blocks"))
    cases = [one_layer(op, size, dtype=dtype, wgrad=wgrad) for op, dtype, wgrad in combinations]
    main_grad = {"dtype": torch.bfloat16, "main_grad": torch.float32}
    for op, wgrad in product(LINEARS[:3], ("whole", "blocks")):
        cases.append(one_layer(op, size, wgrad=wgrad, **main_grad))
    # Rows that do not divide by the group size, fewer rows than ranks, none at all.
    for rows, shape in product((0, 1, 5, 7), ("shifted", "collective")):
        options = {"rounded": False, "schedule": Schedule(shape, chunks=4)}
        cases.append(one_layer("linear_all_reduce", size, rows=rows, **options))
    correct(rank, cases)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks()
def test_attention_and_ulysses(rank: int, dtype: torch.dtype) -> None:
    """All masks; one or several query heads per key head."""
    size, attention = transport().size, (*ULYSSES[1::2], SPLIT)
    cases = [one_layer(op, size, keys=keys) for op, keys in product((*ULYSSES, SPLIT), (1, 2))]
    for op, mask in product(attention, ("full", *MASKS)):
        cases.append(one_layer(op, size, queries=4, mask=mask))
    cases += [one_layer(SPLIT, size, mask=mask, batch=1, scale=0.3) for mask in MASKS]
    cases.append(whole_layer(size))
    correct(rank, [replace(case, dtype=dtype) for case in cases])


@on_ranks(2)
def test_heads_without_gradients(rank: int) -> None:
    """Only those of queries, keys and values that require a gradient get one."""
    shape = 12, 2, 2, HEAD_FEATURES
    qkv = [drawn(rank, name, shape, torch.float32, rounded=True) for name in "qkv"]
    proj = drawn(0, "proj", (32, 64), torch.float32, rounded=True)
    link = transport()
    for wanted, op in product(((), (0,), (1,), (0, 2), (1, 2)), ULYSSES[1::2]):
        weights = () if op == ULYSSES[1] else (proj.clone().requires_grad_(),)
        results = []
        for carrier in (link, CollectiveTransport(link.group, same_pieces=True)):
            heads = [tensor.clone().requires_grad_(at in wanted) for at, tensor in enumerate(qkv)]
            y = ops.attention_all_to_all(*heads, *weights, causal=True, transport=carrier)
            if y.requires_grad:
                y.backward(torch.ones_like(y))
            results.append([head.grad for head in heads])
        for at, (ours, plain) in enumerate(zip(*results, strict=True)):
            assert (ours is not None) == (plain is not None) == (at in wanted), (op, wanted)
            assert ours is None or torch.equal(ours, plain), (op, wanted)


SUMMED = (
    (ULYSSES[0], "micro-batch 0, layer 0 x.grad"),
    (ULYSSES[0], "layer 0 bias.grad"),
    (ULYSSES[2], "micro-batch 0, layer 0 y"),
)
"""Results summed over ranks or chunks in fp32 whose inputs were not rounded before."""


@on_ranks(3)
def test_sums_over_ranks_are_rounded_once(rank: int) -> None:
    for op, name in SUMMED:
        case = one_layer(op, 3, dtype=torch.bfloat16)
        ours, exact = (run_case(case, form)[name] for form in ("fused", "exact"))
        half = torch.finfo(case.dtype).eps / 2 * exact.abs()
        assert ((ours - exact).abs() <= half + 1e-5 * exact.abs().max()).all(), case


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("linear_reduce_scatter", "micro-batch 0, layer 0 y"),
        ("sharded_linear", "layer 0 weight.grad"),
    ],
)
@on_ranks(4)
def test_reduce_dtype_rounds_once(rank: int, op: str, name: str) -> None:
    """The RMS error of a sum over the ranks is smaller in fp32 than in the dtype."""
    errors = []
    for wide in (False, True):
        case = one_layer(op, 4, dtype=torch.bfloat16, bias="no", wide=wide, rows=16, batch=1)
        ours, exact = (run_network(case, form)[name] for form in ("fused", "exact"))
        errors.append((ours - exact).pow(2).mean().sqrt().item())
    assert errors[1] < errors[0]
