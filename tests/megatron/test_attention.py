"""Megatron's own self-attention, with attention that waits for the projection, and without."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.attention import AttentionWrappers
from tests.attention_masks import seen
from tests.megatron.in_ranks import megatron, patched

OPTIONS = LinearOptions(Schedule(lanes=1, chunks=2))
HIDDEN, LENGTH, BATCH = 64, 16, 2


@dataclass(frozen=True)
class Case:
    config: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    mask: str = "causal"
    dtype: torch.dtype = torch.float32
    layers: tuple[str, ...] = ("qkv", "proj")
    recompute: bool = False
    eval: bool = False
    general: bool = False
    """The mask of the data counts, as under ``--attention-mask-type general``."""


def build(case: Case) -> torch.nn.Module:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "tensor_model_parallel_size": dist.get_world_size(),
        "sequence_parallel": True,
        "use_cpu_initialization": True,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "attention_softmax_in_fp32": True,
        "apply_query_key_layer_scaling": False,
    }
    torch.manual_seed(3)
    return SelfAttention(
        TransformerConfig(**(settings | case.config)),
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
        layer_number=1,
        attn_mask_type=getattr(AttnMaskType, case.mask),
    )


@lru_cache
def lanes(group: dist.ProcessGroup) -> Transport:
    return Transport.create(group, lanes=1)


@contextmanager
def wrapped(case: Case, form: str):
    from megatron.core import parallel_state

    wrappers, manager = LinearWrappers(OPTIONS, case.layers, form), PatchManager()
    wrappers.register(manager)
    AttentionWrappers(wrappers).register(manager)
    wrappers.transport = lanes(parallel_state.get_tensor_model_parallel_group())
    with patched(manager):
        yield wrappers


def run(case: Case) -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel import checkpoint

    layer = build(case)
    layer.train(not case.eval)
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = LENGTH // dist.get_world_size() if layer.config.sequence_parallel else LENGTH
    x = torch.randn(rows, BATCH, HIDDEN, generator=generator).to(case.dtype).requires_grad_()
    mask = None
    if case.mask == "causal":
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if case.general:
        layer.config.attention_mask_type = "general"
        mask = ~seen("documents", LENGTH, BATCH)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return layer(hidden, mask, **case.call)[0]

    y = checkpoint(forward, False, x) if case.recompute else forward(x)
    y.square().sum().backward()
    found = {"y": y.detach(), "x.grad": x.grad}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:  # a bias that is added elsewhere has none
            found[f"{name}.grad"] = parameter.grad
    return found


def compared(rank: int, cases: list[tuple[Case, str]]) -> None:
    with megatron(dist.get_world_size()):
        for case, path in cases:
            expected = run(case)
            results = {}
            for form in ("fused", "plain"):
                with wrapped(case, form) as wrappers:
                    results[form] = run(case)
                    times = 2 if case.recompute or "recompute_granularity" in case.config else 1
                    wanted = form if path == "fused" else path
                    assert wrappers.calls["attention", wanted] == times, wrappers.calls
            assert expected.keys() == results["fused"].keys() == results["plain"].keys()
            for name, value in expected.items():
                assert torch.equal(results["fused"][name], results["plain"][name]), (case, name)
                close = {"rtol": 2e-2, "atol": 2e-2} if case.dtype == torch.bfloat16 else {}
                torch.testing.assert_close(results["fused"][name], value, **close)


BASE = Case()


def test_attention_and_projection_run_as_one(ranks) -> None:
    cases = [
        BASE,
        Case(mask="no_mask"),
        Case(dtype=torch.bfloat16),
        Case(recompute=True),
        Case(config={"softmax_scale": 0.2}),
        Case(config={"num_query_groups": 4}),
        Case(config={"attention_dropout": 0.1}, eval=True),
        Case(config={"add_bias_linear": True}),
        Case(general=True),
        Case(general=True, recompute=True),
    ]
    ranks(2).run(compared, [(case, "fused") for case in cases])


def test_what_else_there_is_keeps_megatrons_attention(ranks) -> None:
    cases = [
        (
            replace(BASE, config={"recompute_granularity": "selective"}),
            "selective recomputation runs the core attention by itself",
        ),
        (
            replace(BASE, mask="padding"),
            "its mask is padding; only causal and no_mask can be split by queries",
        ),
        (
            replace(BASE, config={"sequence_parallel": False}),
            "without sequence parallelism nothing is split",
        ),
        (replace(BASE, layers=("qkv",)), "proj is not in the list of layers to fuse"),
    ]
    ranks(2).run(compared, cases)


def dropout(rank: int) -> None:
    case = replace(BASE, config={"attention_dropout": 0.1})
    with megatron(2), wrapped(case, "fused") as wrappers:
        run(case)
        assert wrappers.calls["attention", "attention dropout is 0.1"] == 1


def test_dropout_keeps_megatrons_attention(ranks) -> None:
    ranks(2).run(dropout)
