"""Models of fully sharded linear layers: training, failures, conversion."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from commfuse_npu import MismatchError, TransportError
from commfuse_npu.ops import LinearOptions
from commfuse_npu.ops.sharded_gradients import average_gradients, clip_gradient_norm
from commfuse_npu.ops.sharded_linear import ShardedLinear, shard_linears
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT


@lru_cache
def transport(batched: bool = False) -> Transport:
    return Transport.create(timeout=PATIENT, batched=batched)


def fresh() -> Transport:
    """A transport on a new group, because a collective that a rank misses breaks its group."""
    return Transport.create(dist.new_group(timeout=PATIENT), lanes=2, timeout=PATIENT)


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.gate, self.up = (nn.Linear(48, 96, bias) for _ in range(2))
        self.down = nn.Linear(96, 48, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Tokens ``[B, S]`` to logits ``[B, S, V]``."""

    def __init__(self, *, bias: bool = False, recompute: str = "", tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.recompute = recompute
        self.embedding = nn.Embedding(48, 48)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(2))
        self.head = nn.Linear(48, 48, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            reentrant = self.recompute == "reentrant"
            x = checkpoint(block, x, use_reentrant=reentrant) if self.recompute else block(x)
        return self.head(x)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 48, (2, 17), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, rank: int, steps: int, link: Transport) -> list[float]:
    """Train ``steps`` steps and return the loss of each."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        average_gradients(model, link)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_sharded(
    rank: int, steps: int, *, batched: bool = False, recompute: str = ""
) -> tuple[nn.Module, list[float]]:
    link = transport(True) if batched else transport()
    options = LinearOptions(Schedule(chunks=2))
    model = Model(recompute=recompute)
    shard_linears(model, transport=link, options=options)
    return model, train(model, rank, steps, link)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full weights by name, as a single process has them."""
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, ShardedLinear):
            tensors[f"{name}.weight"] = layer.full_weight()
    return tensors


def digest(model: nn.Module, losses: list[float]) -> tuple[Any, ...]:
    return losses, {name: value.numpy().tobytes() for name, value in weights(model).items()}


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_the_same_training_bit_for_bit(rank: int) -> None:
    """Repeated, with recomputation or batched posts: the same training."""
    first = digest(*train_sharded(rank, 3))
    for other in (
        {},
        {"recompute": "with hooks"},
        {"recompute": "reentrant"},
        {"batched": True},
        {"batched": True, "recompute": "with hooks"},
    ):
        assert digest(*train_sharded(rank, 3, **other)) == first, other


@on_ranks(2)
def test_a_deep_copy_trains_over_the_same_lanes(rank: int) -> None:
    """A copy trains like its original and does not change it."""
    model, _ = train_sharded(rank, 1)
    twin, before = copy.deepcopy(model), digest(model, [])
    twin_digest = digest(twin, train(twin, rank, 2, transport()))
    assert digest(model, []) == before
    assert digest(model, train(model, rank, 2, transport())) == twin_digest
    assert model.blocks[0].gate.transport is twin.blocks[0].gate.transport


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(rank: int) -> None:
    link = transport()
    whole, model = Model(bias=True), Model(bias=True)
    shard_linears(model, transport=link)
    sum(loss_of(whole, r) / link.size for r in range(link.size)).backward()
    loss_of(model, rank).backward()
    average_gradients(model, link)
    for limit in (1e9, 0.1):  # no clipping, clipping
        expected = nn.utils.clip_grad_norm_(whole.parameters(), limit)
        norm = clip_gradient_norm(model, limit, link)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        norms = [torch.zeros(()) for _ in range(link.size)]
        dist.all_gather(norms, norm)
        assert len({value.item() for value in norms}) == 1
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


def chain(link: Transport) -> nn.Sequential:
    """Three layers, with N, 2 N and 3 N rows for N ranks."""
    torch.manual_seed(5)
    sizes = [16, *(link.size * k for k in (1, 2, 3))]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    return shard_linears(model, transport=link)


def failing_rank(rank: int, where: str) -> tuple[str, str]:
    """Rank 1 fails; returns the error of this rank.  No rank steps."""
    link = fresh()
    model = chain(link)
    for _ in range(2):
        model(torch.ones(3, 16)).sum().backward()
        average_gradients(model, link)
    before = [p.detach().clone() for p in model.parameters()]

    def fail(*_: Any) -> None:
        raise KeyError("this rank fails")

    if rank != 1:
        link.timeout = 3 * BRIEF
    elif where == "forward":
        model[1].register_forward_pre_hook(fail)
    outcome = "nothing", ""
    try:
        model(torch.ones(3, 16)).sum().backward()
        if rank == 1:
            fail()
        average_gradients(model, link)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    except (KeyError, TransportError) as error:
        outcome = type(error).__name__, str(error)
    assert all(map(torch.equal, before, model.parameters()))
    return outcome


@pytest.mark.parametrize("where", ["forward", "after"])
def test_a_rank_that_fails_keeps_all_from_stepping(ranks, where: str) -> None:
    (kind, message), (failed, _) = ranks(2).run(failing_rank, where)
    assert (kind, failed) == ("TransportError", "KeyError")
    assert "rank 0 of 2" in message
    assert "average_gradients: not every rank called it" in message or where == "forward"


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
    with pytest.raises(ValueError, match="0 is sharded over another transport"):
        average_gradients(chain(link), transport(True))
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of weight is torch.sparse_coo; make it"):
        average_gradients(embedding, link)


@on_ranks(2)
def test_conversion(rank: int) -> None:
    link = transport()
    model = Model(tied=True)
    model.odd = nn.Linear(4, 7)
    model.attention = nn.MultiheadAttention(4, 2)
    model.again = model.blocks[0].gate
    state = copy.deepcopy(model.state_dict())
    with mock.patch("commfuse_npu.ops.sharded_linear._logger") as logger:
        assert shard_linears(model, transport=link, skip=["blocks.1"]) is model
    ((message, *parts),) = (call.args for call in logger.warning.call_args_list)
    for reason in (
        "head (its weight is used by another module too)",
        "blocks.1.gate (named in skip)",
        "odd (7 output features are not divisible by the group size 2; pad them to 8, or keep",
        "attention.out_proj (it is a NonDynamicallyQuantizableLinear)",
    ):
        assert reason in message % tuple(parts)
    layer = model.blocks[0].gate
    assert model.again is layer
    assert isinstance(layer, ShardedLinear)
    assert type(model.blocks[1].gate) is nn.Linear
    assert model.head.weight is model.embedding.weight
    assert repr(layer) == (
        f"ShardedLinear(in_features=48, out_features=96, bias=False, shard {rank} of {link.size})"
    )
    full = state["blocks.0.gate.weight"]
    assert torch.equal(layer.full_weight(), full)
    assert torch.equal(layer.state_dict()["weight"], full.chunk(link.size)[rank])
    layer.load_full_weight(full + 1)
    assert torch.equal(layer.full_weight(), full + 1)
    assert layer.weight.untyped_storage().nbytes() == full.nbytes // link.size
    with pytest.raises(ValueError, match=r"a weight of shape \(48, 48\) for a layer of \(96, 48\)"):
        layer.load_full_weight(layer.weight)
    with pytest.raises(ValueError, match="skip names typo, which the module does not have"):
        shard_linears(Model(), transport=link, skip=["typo"])
    frozen = nn.Linear(4, 4).requires_grad_(False).eval()
    converted = ShardedLinear(frozen, transport=link)
    assert not converted.weight.requires_grad
    assert not converted.training
    torch.manual_seed(rank)
    with pytest.raises(MismatchError, match=r"parameters: .* here, .* there"):
        shard_linears(nn.Linear(4, 4), transport=fresh())
