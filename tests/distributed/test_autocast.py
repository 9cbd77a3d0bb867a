"""Every op under autocast: fp32 leaves, computed in bf16, like torch's own layers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from commfuse_npu import ops
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT

S, B, A, D, HIDDEN = 8, 2, 2, 16, 32
"""Sequence of all ranks, batch, heads of a rank, features of a head, hidden size."""

HEADS = ((S, B, A, D),) * 3
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "all_gather_linear": ((S // 2, B, HIDDEN), (64, HIDDEN), (64,)),
    "all_to_all_linear": ((S, B, A * D), (HIDDEN, 2 * A * D), (HIDDEN,)),
    "attention_all_to_all": HEADS,
    "attention_all_to_all_linear": (*HEADS, (HIDDEN, 2 * A * D), (HIDDEN,)),
    "attention_linear_reduce_scatter": (*HEADS, (HIDDEN, A * D), (HIDDEN,)),
    "linear_all_reduce": ((S, B, HIDDEN), (64, HIDDEN), (64,)),
    "linear_all_to_all": ((S // 2, B, HIDDEN), (128, HIDDEN), (128,)),
    "linear_reduce_scatter": ((S, B, HIDDEN), (64, HIDDEN), (64,)),
    "sharded_linear": ((S // 2, B, HIDDEN), (32, HIDDEN), (64,)),
}
"""Of the tensors of an op, in a group of two."""


def computes(name: str) -> bool:
    """Whether an entry of ``ops`` is an op on activations: the others take modules or buckets."""
    thing = getattr(ops, name)
    if not inspect.isfunction(thing):
        return False
    return bool({"x", "q"} & set(inspect.signature(thing).parameters))


def test_every_op_is_here() -> None:
    assert set(filter(computes, ops.__all__)) == set(SHAPES)


def run(
    op: Any, name: str, rank: int, dtype: torch.dtype, *, autocast: bool, **where: Any
) -> list[torch.Tensor]:
    """The output and the gradients of all tensors, with leaves of a dtype.

    The backward runs outside autocast, as PyTorch's documentation of ``torch.amp`` recommends.
    """
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(shape, generator=generator) / 4 for shape in SHAPES[name]]
    # Leaves hold what bf16 can, or the two dtypes would start from different numbers.
    leaves = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in drawn]
    more = {"causal": True} if name.startswith("attention") else {}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = op(*leaves, **where, **more)
    grad = torch.randn(y.shape, generator=generator).bfloat16()
    return [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def compared(rank: int, name: str) -> None:
    link = Transport.create(lanes=2, timeout=PATIENT)
    op, collectives = getattr(ops, name), CollectiveTransport(link.group)
    ours = run(op, name, rank, torch.float32, autocast=True, transport=link)
    plainly = run(op, name, rank, torch.float32, autocast=True, transport=collectives)
    assert not link.broken
    assert [tensor.dtype for tensor in ours] == [torch.bfloat16] + [torch.float32] * (len(ours) - 1)
    for mine, theirs in zip(ours, plainly, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2**-5, atol=2**-5)
    low = run(op, name, rank, torch.bfloat16, autocast=False, transport=link)
    for mine, theirs in zip(ours, low, strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype)), "not what bf16 tensors give"


@pytest.mark.parametrize("name", SHAPES)
def test_fp32_leaves_are_computed_in_bf16(ranks: Any, name: str) -> None:
    ranks(2).run(compared, name)


def mistaken(rank: int, name: str) -> list[str]:
    """What is said of a group in the place of a transport, and of a mapping in that of options."""
    transport = Transport.create(lanes=1)
    op = getattr(ops, name)
    tensors = [torch.zeros(shape) for shape in SHAPES[name][:2]]
    said = []
    for wrong in ({"transport": transport.group}, {"options": {"chunks": 2}}):
        with pytest.raises(TypeError) as error:
            op(*tensors, **{"transport": transport, **wrong})
        said.append(str(error.value))
    transport.close()
    return said


@pytest.mark.parametrize(
    "take",
    [
        ops.Buckets,
        lambda given: ops.shard_linears(torch.nn.Linear(4, 4), transport=given),
        lambda given: ops.ShardedLinear.from_linear(torch.nn.Linear(4, 4), transport=given),
    ],
)
def test_a_group_is_not_taken_for_a_transport(take: Any) -> None:
    with pytest.raises(TypeError, match=r"transport is a str; pass what Transport\.create"):
        take("a group")


@pytest.mark.parametrize("name", ["all_gather_linear", "linear_reduce_scatter"])
def test_what_is_mistaken_for_a_transport_or_options_is_named(ranks: Any, name: str) -> None:
    for group, mapping in ranks(2).run(mistaken, name):
        assert group.startswith(f"{name}: transport is a ProcessGroup")
        assert "pass what Transport.create(group) returned" in group
        assert mapping.startswith(f"{name}: options is a dict; pass LinearOptions(...)")
