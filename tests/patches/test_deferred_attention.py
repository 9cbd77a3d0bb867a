"""Attention that waits: what asks for its value gets it, what does not leaves it alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_npu.ops.attention_mask import AttentionMask
from mindspeed_patches.deferred_attention import DeferredAttention

CAUSAL = AttentionMask(True)


class Attend:
    """An attention that counts how often it runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.q = torch.arange(24.0).view(3, 1, 2, 4).requires_grad_()

    def __call__(self) -> torch.Tensor:
        self.runs += 1
        return self.q.flatten(2) * 2

    def deferred(self) -> DeferredAttention:
        return DeferredAttention.of(self.q, self.q, self.q, mask=CAUSAL, scale=None, attend=self)


def test_its_shape_costs_nothing() -> None:
    attend = Attend()
    deferred = attend.deferred()
    assert tuple(deferred.shape) == (3, 1, 8)
    assert (deferred.size(0), deferred.dim(), deferred.ndim, deferred.numel()) == (3, 3, 3, 24)
    assert (deferred.dtype, deferred.device.type, deferred.element_size()) == (
        torch.float32,
        "cpu",
        4,
    )
    assert "DeferredAttention" in repr(deferred)
    assert attend.runs == 0


def test_its_shape_where_heads_are_exchanged_for_rows() -> None:
    q = torch.zeros(6, 1, 2, 4)
    deferred = DeferredAttention.of(
        q, q, q, mask=CAUSAL, scale=None, attend=lambda: torch.ones(2, 1, 24), ranks=3
    )
    assert tuple(deferred.shape) == (2, 1, 24)
    assert torch.equal(deferred + 0, torch.ones(2, 1, 24))


USES = {
    "an operator": lambda x: x + 1,
    "an operator with it on the right": lambda x: 1 + x,
    "a function": lambda x: torch.nn.functional.linear(x, torch.ones(5, 8)),
    "a method": lambda x: x.reshape(3, -1),
    "a part": lambda x: x[1:],
    "in a list": lambda x: torch.cat([x, x]),
    "its values": lambda x: x.tolist(),
    "in place": lambda x: torch.zeros(3, 1, 8).add_(x),
}


@pytest.mark.parametrize("use", sorted(USES))
def test_whoever_else_uses_it_gets_what_attention_returns(use: str) -> None:
    attend = Attend()
    found = USES[use](attend.deferred())
    expected = USES[use](attend())
    assert attend.runs == 2
    if isinstance(found, torch.Tensor):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_it_runs_once_and_gradients_flow() -> None:
    attend = Attend()
    deferred = attend.deferred()
    total = (deferred * 3).sum() + deferred.mean()
    total.backward()
    assert attend.runs == 1
    assert torch.allclose(attend.q.grad, torch.full_like(attend.q, 6 + 2 / 24))


def test_through_a_module_and_a_checkpoint() -> None:
    attend = Attend()
    linear = torch.nn.Linear(8, 5)
    assert torch.equal(linear(attend.deferred()), linear(attend()))

    def layer(q: torch.Tensor) -> Any:
        waiting = DeferredAttention.of(
            q, q, q, mask=CAUSAL, scale=None, attend=lambda: q.flatten(2) * 2
        )
        return linear(waiting)

    checkpoint(layer, attend.q, use_reentrant=False).sum().backward()
    found, attend.q.grad = attend.q.grad, None
    linear(attend.q.flatten(2) * 2).sum().backward()
    assert torch.equal(found, attend.q.grad)


def test_a_copy_is_the_value() -> None:
    attend = Attend()
    attend.q = attend.q.detach()
    assert torch.equal(copy.deepcopy(attend.deferred()), attend())
