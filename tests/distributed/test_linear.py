"""Fused layers on gloo processes: rounding, buffers, and what is posted when.

Their results are compared in :mod:`tests.random_networks`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from commfuse_npu.ops.call import AnyTransport, WeightGradient
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import new_link, transport, watch_calls
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import Layer, Network, one_layer
from tests.random_networks.compare import run_case
from tests.random_networks.values import round_once

COLUMN, ROW = "all_gather_linear backward", "linear_reduce_scatter backward"
USUAL = LinearOptions(chunks=2)
OUT = "micro-batch 0, layer 0 y"

# ------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("linear_all_to_all", "micro-batch 0, layer 0 x.grad"),
        ("linear_all_to_all", "layer 0 bias.grad"),
        ("all_to_all_linear", OUT),
    ],
)
@on_ranks(3)
def test_sums_over_ranks_are_rounded_once(rank: int, op: str, name: str) -> None:
    """Results summed in fp32 over ranks or chunks whose inputs were not rounded before."""
    case = one_layer(op, 3, dtype=torch.bfloat16)
    ours, exact = (run_case(case, form)[name] for form in ("fused", "exact"))
    half = torch.finfo(case.dtype).eps / 2 * exact.abs()
    assert ((ours - exact).abs() <= half + 1e-5 * exact.abs().max()).all(), case


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks()
def test_an_all_reduce_adds_in_the_order_of_a_reduce_scatter(rank: int) -> None:
    """Of inputs times one, which no GEMM rounds; rows that do not divide are padded."""
    link = transport()
    for rows in (1, 6 * link.size, 6 * link.size + 1):
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rank))
        y = linear_all_reduce(x, torch.eye(16), group=link, options=USUAL)
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % link.size))
        sums = all_gather_rows(reduce_scatter_rows(padded, link.group), link.group)
        assert torch.equal(y, sums[:rows])
        if link.size == 2 or rows == 6 * link.size:  # gloo has this order for even blocks
            dist.all_reduce(x, group=link.group)
            assert torch.equal(y, x)


# -------------------------------------------------------------------------- buffers


@on_ranks(2)
def test_training_after_inference(rank: int) -> None:
    """Buffers that were allocated in inference mode can be used by a later training."""
    link, x, weight = new_link(), torch.ones(4, 32), torch.ones(32, 32, requires_grad=True)
    for _ in range(2):
        with torch.inference_mode():
            linear_reduce_scatter(x, weight, group=link)
        linear_reduce_scatter(x, weight, group=link).sum().backward()


# ------------------------------------------------------------------------ transfers


def leaves(rank: int) -> list[torch.Tensor]:
    """``x [s, H]`` and the weights of two pairs of layers."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (8, 32), (64, 32), (32, 64), (64, 32), (32, 64)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def two_pairs(
    given: list[torch.Tensor], transport: AnyTransport, options: LinearOptions = USUAL
) -> torch.Tensor:
    x, how = given[0], {"group": transport, "options": options}
    for first, second in (given[1:3], given[3:]):
        x = x + linear_reduce_scatter(torch.tanh(all_gather_linear(x, first, **how)), second, **how)
    return x


@on_ranks(3)
def test_a_gather_begins_before_the_next_weight_gradient(rank: int) -> None:
    """Programs that begin, posts ahead and weight gradients, in order."""
    wgrads, events = ["wgrad of 64 inputs", "wgrad of 32 inputs"], list[str]()

    def begun(link: Transport, program: object, name: str, *_: object) -> None:
        events.append(f"begin {name}")

    def ran(running: Running, *_: object, ahead: bool = False, **__: object) -> None:
        events.extend([f"ahead {running.name}"] * ahead)

    def added(gradient: WeightGradient, grad: torch.Tensor, x: torch.Tensor) -> None:
        events.append(f"wgrad of {x.shape[1]} inputs")

    for options, expected in (
        (USUAL, [f"begin {ROW}", f"begin {COLUMN}", f"ahead {COLUMN}", *wgrads]),
        # A column-parallel backward by collectives has nothing to send ahead.
        (replace(USUAL, collectives_from=64), [f"begin {ROW}", *wgrads]),
    ):
        y = two_pairs(leaves(rank), transport(), options)
        events.clear()
        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, Transport, "begin", begun)
            watch_calls(patch, Running, "run", ran)
            watch_calls(patch, WeightGradient, "add", added)
            y.sum().backward()
        assert events == expected * 2


@on_ranks(2)
def test_a_pair_has_one_row_parallel_layer(rank: int) -> None:
    """The second one after a column-parallel layer gathers nothing early."""
    begun, row = list[str](), "linear_reduce_scatter"
    layers = tuple(Layer(op, 32, 32) for op in ("all_gather_linear", row, row))
    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, Transport, "begin", lambda _, __, name, *more: begun.append(name))
        run_case(Network(2, layers, rows=8), "fused")
    assert begun[len(layers) :] == [ROW, ROW, COLUMN]


@on_ranks(2)
def test_a_weight_without_columns_has_a_gradient(rank: int) -> None:
    """Of no elements; torch.nn.functional.linear has one, too."""
    weight = torch.empty(3, 0, requires_grad=True)
    linear_reduce_scatter(torch.empty(4, 0), weight, group=transport()).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


@on_ranks(3)
def test_a_pruned_backward_gathers_nothing_early(rank: int) -> None:
    """Only the last weight's gradient is requested: the layer before it has no backward."""
    link, plain = transport(), CollectiveTransport(transport().group)
    for wanted in (slice(-1, None), slice(-1, None), slice(None)):
        tensors = leaves(rank)
        with round_once():
            ours, reference = (
                torch.autograd.grad(two_pairs(tensors, carrier).sum(), tensors[wanted])
                for carrier in (link, plain)
            )
        assert all(map(torch.equal, ours, reference))
        assert link.scratch.lent == 0


@on_ranks(2)
def test_a_pair_does_not_depend_on_what_a_rank_keeps(rank: int) -> None:
    """A column-parallel result without a backward is kept on one rank, dropped on the other."""
    begun = list[str]()
    x, column, *_ = leaves(rank)
    kept = all_gather_linear(x, column, group=transport())
    if rank == 1:
        del kept
    a, row = torch.ones(16, 5), torch.ones(32, 5, requires_grad=True)
    y = linear_reduce_scatter(a, row, group=transport())
    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, Transport, "begin", lambda _, __, name, *more: begun.append(name))
        y.sum().backward()
    assert begun == [ROW]
    transport().check_digests()


@on_ranks(2)
def test_an_interrupted_backward_is_drained_by_the_next_forward(rank: int) -> None:
    """All ranks skip a micro-batch whose backward raises between the layers of a pair."""
    link, plain = transport(), CollectiveTransport(transport().group, same_pieces=True)
    tensors = leaves(rank)
    how = {"group": link, "options": USUAL}
    hidden = all_gather_linear(tensors[0], tensors[1], **how)

    def raises(grad: torch.Tensor) -> None:
        raise ArithmeticError("not finite")

    hidden.register_hook(raises)
    with pytest.raises(ArithmeticError):
        linear_reduce_scatter(hidden, tensors[2], **how).sum().backward()
    assert link.scratch.lent > 0, "its input is under way"
    ours, reference = (
        torch.autograd.grad(two_pairs(tensors, carrier).sum(), tensors) for carrier in (link, plain)
    )
    assert all(map(torch.equal, ours, reference))
    assert link.scratch.lent == 0


def without_main_grad(x: torch.Tensor, weight: torch.Tensor) -> None:
    del weight.main_grad  # type: ignore[attr-defined]


def changed_input(x: torch.Tensor, weight: torch.Tensor) -> None:
    x.detach().add_(1)


def changed_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    weight.detach().add_(1)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (without_main_grad, "weight.main_grad is None"),
        (changed_input, "modified by an inplace operation"),
        (changed_weight, "the weight was modified in place"),
    ],
)
@on_ranks(2)
def test_a_mistake_with_a_column_parallel_layer_begins_nothing(
    rank: int, mistake: Any, words: str
) -> None:
    """All ranks raise, with and without a row-parallel layer after it; the transport is usable."""
    link, options = transport(), LinearOptions(chunks=2, main_grad=True)
    for paired in (False, True):
        x, column, row, *_ = leaves(rank)
        x = x * 1
        for weight in (column, row):
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        y = all_gather_linear(x, column, group=link, options=options)
        if paired:
            y = linear_reduce_scatter(y, row, group=link, options=options)
        mistake(x, column)
        with pytest.raises(RuntimeError, match=words):
            y.sum().backward()
        assert not link.broken
        assert (link.scratch.lent, link.in_flight) == (0, [])
    link.check_digests()
