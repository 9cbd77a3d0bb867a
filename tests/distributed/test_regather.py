"""The input of a column-parallel layer is on its way again before its backward begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    linear_reduce_scatter,
)
from commfuse_npu.ops.weight import WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import watch_calls
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Model = Callable[[list[torch.Tensor], Layer, Layer], torch.Tensor]

COLUMN, ROW = "all_gather_linear backward", "linear_reduce_scatter backward"


@lru_cache
def transport(batched: bool = False) -> Transport:
    return Transport.create(lanes=2, timeout=PATIENT, batched=batched)


def leaves(rank: int) -> list[torch.Tensor]:
    """``x [s, H]``, and the weights of two pairs of layers."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (8, 32), (64, 32), (32, 64), (64, 32), (32, 64)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def two_pairs(given: list[torch.Tensor], column: Layer, row: Layer) -> torch.Tensor:
    x, first, second, third, fourth = given
    x = x + row(torch.tanh(column(x, first)), second)
    return x + row(torch.tanh(column(x, third)), fourth)


def two_columns(given: list[torch.Tensor], column: Layer, row: Layer) -> torch.Tensor:
    """As with multi-head latent attention: both before one row-parallel layer."""
    x, first, second, third, _ = given
    return row(torch.tanh(column(x, first)) * column(x * 2, third), second)


def recomputed(model: Model, reentrant: bool) -> Model:
    def call(given: list[torch.Tensor], column: Layer, row: Layer) -> torch.Tensor:
        def forward(*tensors: torch.Tensor) -> torch.Tensor:
            return model(list(tensors), column, row)

        return checkpoint(forward, *given, use_reentrant=reentrant)

    return call


def each_recomputed(given: list[torch.Tensor], column: Layer, row: Layer) -> torch.Tensor:
    """A checkpoint per layer: an input that is asked for early is recomputed early."""

    def alone(layer: Layer) -> Layer:
        return lambda *tensors: checkpoint(
            lambda x, weight: layer(x * 1, weight), *tensors, use_reentrant=False
        )

    return two_pairs(given, alone(column), alone(row))


def gradients(model: Model, given: list[torch.Tensor], column: Layer, row: Layer) -> list[object]:
    for tensor in given:
        tensor.grad = None
    y = model(given, column, row)
    (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
    return [y, *(tensor.grad for tensor in given)]


def layers(link: Transport, options: LinearOptions) -> tuple[Layer, Layer, Layer, Layer]:
    """Fused, and plain."""
    ours = {"transport": link, "options": options}
    collectives = CollectiveTransport(link.group, same_pieces=True)
    plain = {"transport": collectives, "options": options}
    return (
        partial(all_gather_linear, **ours),
        partial(linear_reduce_scatter, **ours),
        partial(all_gather_linear, **plain),
        partial(linear_reduce_scatter, **plain),
    )


def same(ours: list[object], plain: list[object]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def watched(patch: pytest.MonkeyPatch) -> list[str]:
    """What a transport begins, posts ahead and multiplies from now on, in order."""
    events: list[str] = []

    def begun(link: Transport, program: Program, name: str, *_: object) -> None:
        events.append(f"begin {name}")

    def ran(running: Running, *_: object, ahead: bool = False, **__: object) -> None:
        if ahead:
            events.append(f"ahead {running.name}")

    def added(gradient: WeightGradient, grad: torch.Tensor, x: torch.Tensor) -> None:
        events.append(f"wgrad of {x.shape[1]} inputs")

    watch_calls(patch, Transport, "begin", begun)
    watch_calls(patch, Running, "run", ran)
    watch_calls(patch, WeightGradient, "add", added)
    return events


MODELS: tuple[Model, ...] = (
    two_columns,
    recomputed(two_pairs, False),
    recomputed(two_pairs, True),
    each_recomputed,
)


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(3)
def test_bits_of_the_plain_form(rank: int, batched: bool) -> None:
    """Every option with the usual model, every model with the usual options."""
    link = transport(batched)
    usual = LinearOptions(Schedule(chunks=2))
    choices = product(("whole", "blocks"), (False, True), (None, 64, 65))
    cases = [
        (two_pairs, replace(usual, wgrad=wgrad, keep_gathered=keep, collectives_from=least))
        for wgrad, keep, least in choices
    ]
    for model, options in [*cases, *((model, usual) for model in MODELS)]:
        column, row, plain_column, plain_row = layers(link, options)
        given = leaves(rank)
        ours = gradients(model, given, column, row)
        same(ours, gradients(model, given, plain_column, plain_row))
        assert not link.scratch.lent


@on_ranks(3)
def test_it_is_sent_before_the_weight_gradient_of_the_layer_after(rank: int) -> None:
    column, row, *_ = layers(transport(), LinearOptions(Schedule(chunks=2)))
    given = leaves(rank)
    y = two_pairs(given, column, row)
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(patch)
        y.sum().backward()
    pair = [f"begin {ROW}", f"begin {COLUMN}", f"ahead {COLUMN}", "wgrad of 64 inputs",
            "wgrad of 32 inputs"]  # fmt: skip
    assert seen == pair * 2


@on_ranks(3)
def test_nothing_is_sent_ahead_of_collectives(rank: int) -> None:
    """A column-parallel backward by collectives has nothing to send ahead."""
    options = LinearOptions(Schedule(chunks=2), collectives_from=64)
    column, row, *_ = layers(transport(), options)
    y = two_pairs(leaves(rank), column, row)
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(patch)
        y.sum().backward()
    assert seen == [f"begin {ROW}", "wgrad of 64 inputs", "wgrad of 32 inputs"] * 2


@on_ranks(3)
def test_frozen_weights(rank: int) -> None:
    """A weight without a gradient needs no input; one after it begins nothing."""
    column, row, plain_column, plain_row = layers(transport(), LinearOptions())
    for frozen in range(5):
        ours, plain = leaves(rank), leaves(rank)
        ours[frozen].requires_grad_(False)
        plain[frozen].requires_grad_(False)
        same(
            gradients(two_pairs, ours, column, row),
            gradients(two_pairs, plain, plain_column, plain_row),
        )


@on_ranks(3)
def test_a_pruned_backward(rank: int) -> None:
    """Only the gradient of the last weight is asked for: the input is sent and nobody comes."""
    link = transport()
    column, row, plain_column, plain_row = layers(link, LinearOptions())
    given = leaves(rank)
    for _ in range(2):
        y = two_pairs(given, column, row)
        (found,) = torch.autograd.grad(y.sum(), given[-1:])
        reference = two_pairs(given, plain_column, plain_row).sum()
        assert torch.equal(found, torch.autograd.grad(reference, given[-1:])[0])
        assert link.scratch.lent, "its input is under way"
    same(
        gradients(two_pairs, given, column, row),
        gradients(two_pairs, given, plain_column, plain_row),
    )
    assert not link.scratch.lent


@on_ranks(3)
def test_backwards_in_another_order(rank: int) -> None:
    """A second backward through the same graph; a layer whose backward was before."""
    link = transport()
    column, row, *_ = layers(link, LinearOptions())
    given = leaves(rank)
    y = two_pairs(given, column, row).sum()
    first = torch.autograd.grad(y, given, retain_graph=True)
    same(list(torch.autograd.grad(y, given)), list(first))

    x, weight, other, *_ = given
    alone = column(x, weight)
    alone.sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(patch)
        row(alone.detach(), other).sum().backward()
    assert seen == [
        "begin linear_reduce_scatter", f"begin {ROW}", "wgrad of 64 inputs",
    ]  # fmt: skip
    assert not link.scratch.lent
