"""The input of a column-parallel layer is gathered again before its backward begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.ops.call import AnyTransport, WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import transport, watch_calls
from tests.distributed.ranks import on_ranks

COLUMN, ROW = "all_gather_linear backward", "linear_reduce_scatter backward"
USUAL = LinearOptions(Schedule(chunks=2))


def leaves(rank: int) -> list[torch.Tensor]:
    """``x [s, H]`` and the weights of two pairs of layers."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (8, 32), (64, 32), (32, 64), (64, 32), (32, 64)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def two_pairs(
    given: list[torch.Tensor], transport: AnyTransport, options: LinearOptions = USUAL
) -> torch.Tensor:
    x, how = given[0], {"transport": transport, "options": options}
    for first, second in (given[1:3], given[3:]):
        h = torch.tanh(all_gather_linear(x, first, **how))
        x = x + linear_reduce_scatter(h, second, **how)
    return x


def plain(link: Transport) -> CollectiveTransport:
    return CollectiveTransport(link.group, same_pieces=True)


def compared(link: Transport, options: LinearOptions = USUAL, frozen: int = -1) -> None:
    """Assert that result and gradients equal those of the plain form bit for bit."""
    results = []
    for carrier in (link, plain(link)):
        tensors = leaves(link.rank)
        for place, tensor in enumerate(tensors):
            tensor.requires_grad_(place != frozen)
        y = two_pairs(tensors, carrier, options)
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        results.append([y, *(tensor.grad for tensor in tensors)])
    for ours, reference in zip(*results, strict=True):
        assert (ours is None) == (reference is None)
        assert ours is None or torch.equal(ours, reference)
    assert not link.scratch.lent


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(3)
def test_bits_of_the_plain_form(rank: int, batched: bool) -> None:
    link = transport(batched)
    for wgrad, least in product(("whole", "blocks"), (None, 64, 65)):
        compared(link, replace(USUAL, wgrad=wgrad, collectives_from=least))
    for frozen in range(5):  # a weight without a gradient needs no input
        compared(link, frozen=frozen)


@on_ranks(3)
def test_it_is_sent_before_the_weight_gradient_of_the_layer_after(rank: int) -> None:
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
        # With blocks: before the last of them.
        (
            replace(USUAL, wgrad="blocks"),
            [f"begin {ROW}", *wgrads[:1] * 2, f"begin {COLUMN}", f"ahead {COLUMN}", *wgrads],
        ),
    ):
        y = two_pairs(leaves(rank), transport(), options)
        events.clear()
        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, Transport, "begin", begun)
            watch_calls(patch, Running, "run", ran)
            watch_calls(patch, WeightGradient, "add", added)
            y.sum().backward()
        assert events == expected * 2


@on_ranks(3)
def test_a_pruned_backward(rank: int) -> None:
    """Only the last weight's gradient is requested: a gather is begun and never used."""
    link, tensors = transport(), leaves(rank)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(two_pairs(tensors, link).sum(), tensors[-1:])
        reference = two_pairs(tensors, plain(link)).sum()
        assert torch.equal(gradient, torch.autograd.grad(reference, tensors[-1:])[0])
        assert link.scratch.lent, "its input is under way"
    compared(link)
