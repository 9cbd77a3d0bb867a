"""Models of fully sharded linear layers: gradients and conversion."""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from commfuse_npu import MismatchError
from commfuse_npu.ops import (
    ShardedLinear,
    average_gradients,
    clip_gradient_norm,
    shard_linears,
)
from tests.distributed.programs import new_link, transport
from tests.distributed.ranks import on_ranks


def made(*, bias: bool = False) -> nn.Sequential:
    """Tokens ``[B, S]`` to logits ``[B, S, V]``."""
    torch.manual_seed(7)
    up, down = nn.Linear(48, 96, bias), nn.Linear(96, 48, bias)
    head = nn.Linear(48, 48, bias=False)
    return nn.Sequential(nn.Embedding(48, 48), up, nn.SiLU(), down, nn.LayerNorm(48), head)


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 48, (2, 17), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))])
@on_ranks()
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(rank: int) -> None:
    link = transport()
    whole, model = made(bias=True), shard_linears(made(bias=True), transport=link)
    sum(loss_of(whole, r) / link.size for r in range(link.size)).backward()
    loss_of(model, rank).backward()
    average_gradients(model, link)
    for limit in (1e9, 0.1):  # no clipping, clipping
        expected = nn.utils.clip_grad_norm_(whole.parameters(), limit)
        norm = clip_gradient_norm(model, limit, link)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        assert link.share("norm", norm.item()) == [norm.item()] * link.size
        for (name, full), local in zip(whole.named_parameters(), model.parameters(), strict=True):
            part = full.grad if local.shape == full.shape else full.grad.chunk(link.size)[rank]
            torch.testing.assert_close(local.grad, part, rtol=1e-4, atol=1e-6, msg=name)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    clip_gradient_norm(model, math.inf, link)  # measures only
    for grad in (before[0], next(model.parameters()).grad):  # a replicated parameter
        grad[0] = math.nan
    assert clip_gradient_norm(model, 0.01, link).isnan()
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7.0), grad.nan_to_num(7.0))
    with pytest.raises(ValueError, match=r"max_norm is 0; it has to be above 0"):
        clip_gradient_norm(model, 0, link)


@on_ranks(3)
def test_replicated_gradients(rank: int) -> None:
    link = transport()
    model = nn.ParameterList(torch.ones(n) for n in (3, 5, 2, 1))
    model[2].data = model[2].bfloat16()
    model[3].requires_grad_(False)
    model[0].grad = torch.full((3,), float(rank))
    model[2].grad = torch.ones(2, dtype=torch.bfloat16) if rank == 0 else None
    average_gradients(model, link)
    assert torch.equal(model[0].grad, torch.ones(3))
    assert model[1].grad is model[3].grad is None
    assert torch.equal(model[2].grad, torch.ones(2).div(3).bfloat16())
    with pytest.raises(ValueError, match="1 is sharded over another transport"):
        average_gradients(shard_linears(made(), transport=link), transport(True))
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of weight is torch.sparse_coo; make it"):
        average_gradients(embedding, link)


@on_ranks(2)
def test_conversion(rank: int) -> None:
    link, model = transport(), made()
    model[5].weight = model[0].weight
    model.odd = nn.Linear(4, 7)
    model.attention = nn.MultiheadAttention(4, 2)
    model.again = model[1]
    full = model[1].weight.detach().clone()
    with mock.patch("commfuse_npu.ops.sharded_linear._logger") as logger:
        assert shard_linears(model, transport=link, skip=["3"]) is model
    ((message, *parts),) = (call.args for call in logger.warning.call_args_list)
    for reason in (
        "5 (its weight is used by another module too)",
        "3 (named in skip)",
        "odd (7 output features are not divisible by the group size 2; pad them to 8, or keep",
        "attention.out_proj (it is a NonDynamicallyQuantizableLinear)",
    ):
        assert reason in message % tuple(parts)
    layer = model[1]
    assert model.again is layer
    assert copy.deepcopy(model).again.transport is link
    assert isinstance(layer, ShardedLinear)
    assert type(model[3]) is nn.Linear
    assert model[5].weight is model[0].weight
    assert repr(layer) == (
        f"ShardedLinear(in_features=48, out_features=96, bias=False, shard {rank} of {link.size})"
    )
    assert torch.equal(layer.full_weight(), full)
    assert torch.equal(layer.state_dict()["weight"], full.chunk(link.size)[rank])
    layer.load_full_weight(full + 1)
    assert torch.equal(layer.full_weight(), full + 1)
    assert layer.weight.untyped_storage().nbytes() == full.nbytes // link.size
    with pytest.raises(ValueError, match=r"a weight of shape \(48, 48\) for a layer of \(96, 48\)"):
        layer.load_full_weight(layer.weight)
    with pytest.raises(ValueError, match="skip names typo, which the module does not have"):
        shard_linears(made(), transport=link, skip=["typo"])
    frozen = shard_linears(nn.Linear(4, 4).requires_grad_(False).eval(), transport=new_link())
    assert not frozen.weight.requires_grad
    assert not frozen.training
    torch.manual_seed(rank)
    with pytest.raises(MismatchError, match=r"parameters: .* here, .* there"):
        shard_linears(nn.Linear(4, 4), transport=new_link())
