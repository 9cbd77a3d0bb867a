"""Which results of GEMMs nothing reads, for each kind of reader."""

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from commfuse_npu.overlap.unread import Readers, saved_bytes
from commfuse_npu.runtime.undefined_results import results_are_undefined, undefined_results


class Product(torch.autograd.Function):
    """A GEMM as Megatron's layers have it: only its operands are saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class KeepsItsInput(torch.autograd.Function):
    """Keeps a tensor as an attribute, not as a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


STATISTICS: dict[str, Any] = {"sum": torch.zeros(())}


def stored(y: torch.Tensor) -> torch.Tensor:
    STATISTICS["last"] = y.detach()
    return y


def accumulated(y: torch.Tensor) -> torch.Tensor:
    STATISTICS["sum"].add_(y.detach().sum())
    return y


def swapped_out(y: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return y.exp()


@torch.library.custom_op("commfuse_tests::scaled", mutates_args=())
def scaled(y: torch.Tensor) -> torch.Tensor:
    return y * 2


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda y: functional.rms_norm(y, y.shape[-1:]),
    "product": lambda y: y * torch.ones_like(y).requires_grad_(),
    "activation": functional.silu,
    "function that keeps its input": KeepsItsInput.apply,
    "operator of a library": scaled,
    "host": lambda y: y if y.sum().item() else -y,
    "attribute": stored,
    "statistic": accumulated,
    "hooks that save other tensors": swapped_out,
}
NONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "addition": lambda y: y + torch.ones_like(y),
    "dropout": lambda y: functional.dropout(y, 0.5),
    "native dropout": lambda y: torch.native_dropout(y, 0.5, True)[0],
    "view": lambda y: y.view(-1),
}


def unread(after: Callable[[torch.Tensor], torch.Tensor]) -> int:
    x = torch.randn(4, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    with Readers() as readers:
        with readers.follow_products():
            y = Product.apply(x, weight)
        y = after(y)
    return readers.unread(y)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_reader_is_found(reader: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert unread(reader) == 0


@pytest.mark.parametrize("after", NONE.values(), ids=NONE)
def test_what_does_not_read_values_is_no_reader(
    after: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert unread(after) == 1


def test_the_host_reads_only_what_its_value_depends_on() -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with Readers() as readers:
        with readers.follow_products():
            first = x @ weight
        with readers.follow_products():
            second = x @ weight
        first.sum().item()
        y = first + second
    assert readers.unread(y) == 1


def test_a_backward_gets_the_parameters_themselves() -> None:
    """Megatron's fused accumulation finds ``main_grad`` by the saved weight."""
    got = []

    class Fused(Product):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            got.append(ctx.saved_tensors[1])
            return Product.backward(ctx, grad)

    weight = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4, requires_grad=True)
    with Readers() as readers, readers.follow_products():
        y = Fused.apply(x, weight)
    assert readers.unread(y) == 1
    assert saved_bytes(y + x.exp()) == 4 * 4 * 4
    y.sum().backward()
    assert got == [weight]
    assert got[0] is weight


def test_only_the_blocks_after_the_last_reader_are_unread() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    total = x
    with Readers() as readers:
        for activation in (functional.silu, torch.clone, torch.clone):
            with readers.follow_products():
                y = Product.apply(x, weight)
            total = total + activation(y)
    assert readers.unread(total) == 2


def test_a_product_after_a_block_is_none_of_the_block() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    with Readers() as readers:
        with readers.follow_products():
            y = Product.apply(x, weight)
        other = functional.silu(torch.matmul(x, weight))
        total = y + other
    assert readers.unread(total) == 1


def test_the_objects_of_a_process_are_searched_once_per_run() -> None:
    """There may be millions."""
    with mock.patch.object(gc, "get_referrers", wraps=gc.get_referrers) as search:
        unread(lambda y: (y + y.clone()).view(-1))
    search.assert_called_once()


def test_undefined_results_have_shapes_and_gradients() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    expected = torch.autograd.grad(Product.apply(x, weight).sum(), (x, weight))
    with undefined_results():
        assert results_are_undefined()
        y = Product.apply(x, weight)
        computed = functional.linear(x, weight)  # outside of a function it is part of the graph
    assert not results_are_undefined()
    assert y.shape == (4, 5)
    gradients = torch.autograd.grad(y.sum(), (x, weight))
    assert all(map(torch.equal, gradients, expected))
    assert torch.equal(computed, functional.linear(x, weight))
