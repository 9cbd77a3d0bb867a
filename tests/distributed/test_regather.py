"""The input of a column-parallel layer is on its way again before its backward begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

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
from tests.distributed.programs import transport, watch_calls
from tests.distributed.ranks import on_ranks

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

COLUMN, ROW = "all_gather_linear backward", "linear_reduce_scatter backward"
USUAL = LinearOptions(Schedule(chunks=2))


def leaves(rank: int) -> list[torch.Tensor]:
    """``x [s, H]``, and the weights of two pairs of layers."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (8, 32), (64, 32), (32, 64), (64, 32), (32, 64)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def two_pairs(given: list[torch.Tensor], column: Layer, row: Layer) -> torch.Tensor:
    x, first, second, third, fourth = given
    x = x + row(torch.tanh(column(x, first)), second)
    return x + row(torch.tanh(column(x, third)), fourth)


def layers(carrier: Transport | CollectiveTransport, options: LinearOptions) -> list[Layer]:
    """A column- and a row-parallel one."""
    ops = all_gather_linear, linear_reduce_scatter
    return [partial(op, transport=carrier, options=options) for op in ops]


def plain(link: Transport, options: LinearOptions) -> list[Layer]:
    return layers(CollectiveTransport(link.group, same_pieces=True), options)


def compared(link: Transport, options: LinearOptions, frozen: int = -1) -> None:
    """Result and gradients are the plain form's, bit for bit."""
    found = []
    for pair in (layers(link, options), plain(link, options)):
        given = leaves(link.rank)
        for place, tensor in enumerate(given):
            tensor.requires_grad_(place != frozen)
        y = two_pairs(given, *pair)
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        found.append([y, *(tensor.grad for tensor in given)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert not link.scratch.lent


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


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(3)
def test_bits_of_the_plain_form(rank: int, batched: bool) -> None:
    link = transport(batched)
    for wgrad, keep, least in product(("whole", "blocks"), (False, True), (None, 64, 65)):
        changes = {"wgrad": wgrad, "keep_gathered": keep, "collectives_from": least}
        compared(link, replace(USUAL, **changes))


@on_ranks(3)
def test_it_is_sent_before_the_weight_gradient_of_the_layer_after(rank: int) -> None:
    wgrads = ["wgrad of 64 inputs", "wgrad of 32 inputs"]
    for options, pair in (
        (USUAL, [f"begin {ROW}", f"begin {COLUMN}", f"ahead {COLUMN}", *wgrads]),
        # A column-parallel backward by collectives has nothing to send ahead.
        (replace(USUAL, collectives_from=64), [f"begin {ROW}", *wgrads]),
    ):
        y = two_pairs(leaves(rank), *layers(transport(), options))
        with pytest.MonkeyPatch.context() as patch:
            seen = watched(patch)
            y.sum().backward()
        assert seen == pair * 2


@on_ranks(3)
def test_frozen_weights(rank: int) -> None:
    """A weight without a gradient needs no input; one after it begins nothing."""
    for frozen in range(5):
        compared(transport(), LinearOptions(), frozen)


@on_ranks(3)
def test_a_pruned_backward(rank: int) -> None:
    """Only the gradient of the last weight is asked for: the input is sent and nobody comes."""
    link, options, given = transport(), LinearOptions(), leaves(rank)
    for _ in range(2):
        y = two_pairs(given, *layers(link, options))
        (found,) = torch.autograd.grad(y.sum(), given[-1:])
        reference = two_pairs(given, *plain(link, options)).sum()
        assert torch.equal(found, torch.autograd.grad(reference, given[-1:])[0])
        assert link.scratch.lent, "its input is under way"
    compared(link, options)
