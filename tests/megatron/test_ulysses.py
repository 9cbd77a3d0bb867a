"""Attention under Ulysses: the module of the CPU pretraining, wrapped, as it is, and not split."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.ulysses import UlyssesWrappers
from mindspeed_patches.ulysses_exchange import innermost, scale_of
from mindspeed_patches.wrappers import LAYERS
from tests.attention_masks import ends_of, seen
from tests.limits import PATIENT
from tests.megatron.in_ranks import megatron, patched

MODULE = "scripts.cpu_pretraining.ulysses.UlyssesAttention"
LENGTH, BATCH, DIMENSION = 16, 2, 8
FULL = {"rtol": 2e-2, "atol": 2e-2}


@dataclass(frozen=True)
class Case:
    heads: int = 4
    key_heads: int = 2
    mask: str = "causal"
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    schedule: Schedule = Schedule(lanes=1, chunks=2)
    recompute: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    documents: bool = False
    """Told as MindSpeed does where attention is wrapped, else by a mask."""


def all_ranks() -> AbstractContextManager[None]:
    """Megatron with context parallelism over all ranks."""
    return megatron(context_parallel=dist.get_world_size())


def build(case: Case, context_parallel: int) -> torch.nn.Module:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from scripts.cpu_pretraining.ulysses import UlyssesAttention

    settings = {
        "num_layers": 1,
        "hidden_size": case.heads * DIMENSION,
        "num_attention_heads": case.heads,
        "num_query_groups": case.key_heads,
        "context_parallel_size": context_parallel,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "apply_query_key_layer_scaling": False,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "softmax_scale": case.scale,
    }
    kind = UlyssesAttention if context_parallel > 1 else DotProductAttention
    mask = getattr(AttnMaskType, case.mask)
    config = TransformerConfig(**(settings | case.config))
    return kind(config, 1, mask, "self", softmax_scale=config.softmax_scale)


def tensors(case: Case) -> list[torch.Tensor]:
    """q, k and v of the whole sequence, and the gradient of what comes out: the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(heads, DIMENSION) for heads in (case.heads, case.key_heads, case.key_heads)]
    shapes.append((case.heads * DIMENSION,))
    return [torch.randn(LENGTH, BATCH, *s, generator=generator).to(case.dtype) for s in shapes]


def run(case: Case, context_parallel: int, *, fused: bool = False) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v, of this rank's rows."""
    from megatron.core.tensor_parallel import checkpoint

    attention = build(case, context_parallel)
    mask = None
    if case.mask == "causal":
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    given: dict[str, Any] = {"attn_mask_type": None}
    if case.documents and fused:
        attention.local_attn.config.reset_attention_mask = True
        ends = torch.tensor(ends_of("documents", LENGTH, BATCH))
        given["packed_seq_params"] = SimpleNamespace(cu_seqlens_q=ends)
    elif case.documents:
        mask = ~seen("documents", LENGTH, BATCH)
    rows = LENGTH // context_parallel
    rank = dist.get_rank() if context_parallel > 1 else 0
    *leaves, grad = (x[rank * rows : (rank + 1) * rows].clone() for x in tensors(case))
    for leaf in leaves:
        leaf.requires_grad_()

    def forward(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(*qkv, mask, **given)

    y = checkpoint(forward, False, *leaves) if case.recompute else forward(*leaves)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@lru_cache
def lanes(ranks: int) -> Transport:
    return Transport.create(lanes=3, timeout=PATIENT)


@contextmanager
def wrapped(
    options: LinearOptions, form: str, layers: tuple[str, ...] = LAYERS
) -> Iterator[LinearWrappers]:
    """What counts calls, while attention under Ulysses and the layers around it are wrapped."""
    from megatron.core import parallel_state

    linears, manager = LinearWrappers(layers=layers), PatchManager()
    ulysses = UlyssesWrappers(linears, options, form)
    ulysses.register(manager, MODULE)
    ulysses.transport = lanes(dist.get_world_size())
    # The lanes of another test over the same ranks serve, whatever group they were made for.
    ulysses.transport.group = parallel_state.get_context_parallel_group()
    with patched(manager):
        yield linears


def compared(rank: int, cases: list[Case]) -> None:
    size = dist.get_world_size()
    with all_ranks():
        for case in cases:
            results = {}
            for form in ("fused", "plain"):
                with wrapped(LinearOptions(case.schedule), form) as linears:
                    results[form] = run(case, size, fused=True)
                    assert linears.calls == {("ulysses", form): 1 + case.recompute}, case
            unfused = run(case, size)
            rows = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
            not_split = [x[rows] for x in run(case, 1)]
            close = FULL if case.dtype == torch.bfloat16 else {}
            for fused, plain, own, whole in zip(
                results["fused"], results["plain"], unfused, not_split, strict=True
            ):
                assert torch.equal(fused, plain), case
                torch.testing.assert_close(own, whole, **close)
                torch.testing.assert_close(fused, own, **close)


def test_fused_plain_unfused_and_not_split(ranks) -> None:
    cases = [
        Case(),
        Case(mask="no_mask", schedule=Schedule(lanes=1)),
        Case(dtype=torch.bfloat16),
        Case(recompute=True),
        Case(scale=0.2),
        Case(key_heads=4),
        Case(documents=True),
        Case(documents=True, key_heads=1, recompute=True),
        Case(key_heads=1),  # repeated: one for each of two ranks
        Case(heads=6, key_heads=3),  # repeated although there are more than ranks
    ]
    ranks(2).run(compared, cases)


def test_four_ranks_that_share_key_heads(ranks) -> None:
    cases = [
        Case(heads=8, key_heads=2, schedule=Schedule(lanes=3)),
        Case(heads=4, key_heads=1, schedule=Schedule(lanes=1)),
        Case(heads=4, key_heads=4, schedule=Schedule("two_level", lanes=2, node_size=2)),
    ]
    ranks(4).run(compared, cases)


def dropout_keeps_its_own_forward(rank: int) -> int:
    case = Case(config={"attention_dropout": 0.1})
    with all_ranks(), wrapped(LinearOptions(case.schedule), "fused") as linears:
        assert all(torch.isfinite(x).all() for x in run(case, 2))
        return linears.calls["ulysses", "attention dropout is 0.1"]


def test_what_is_left_alone_runs_as_before(ranks) -> None:
    assert ranks(2).run(dropout_keeps_its_own_forward) == [1, 1]


GROUP = object()


class UnevenSequence:
    def calculate(self, mask: torch.Tensor, **_: Any) -> int:
        return mask.shape[-1]


def attention(**changes: Any) -> Any:
    """What the wrapper reads of MindSpeed's class; the core may be inside another."""
    exchange = {"spg": GROUP, "scatter_idx": 2, "gather_idx": 0}
    exchange |= changes.pop("exchange", {})
    config = SimpleNamespace(attention_dropout=0.0, **changes.pop("config", {}))
    core = SimpleNamespace(config=config, attn_mask_type=changes.pop("mask", "causal"))
    core.ulysses_comm_para = exchange
    if changes.pop("nested", False):
        core = SimpleNamespace(core_attention=core, config=config, ulysses_comm_para=exchange)
    return SimpleNamespace(local_attn=core, training=True, **changes)


def qkv(heads: int = 4, key_heads: int = 2, length: int = 8) -> list[torch.Tensor]:
    return [torch.zeros(length, 1, n, 4) for n in (heads, key_heads, key_heads)]


OBSTACLES = [
    (attention(mask="padding"), {}, qkv(), "its mask is padding; only causal and no_mask can be"),
    (attention(mask="padding", nested=True), {}, qkv(), "its mask is padding"),
    (attention(), {"attn_mask_type": "arbitrary"}, qkv(), "its mask is arbitrary; only"),
    (
        attention(),
        {"packed_seq_params": object()},
        qkv(),
        "are not those of --reset-attention-mask",
    ),
    (attention(), {"attention_bias": object()}, qkv(), "an attention bias is added"),
    (attention(config={"window_size": (4, 0)}), {}, qkv(), "a sliding window limits the keys"),
    (attention(), {}, [qkv(), *qkv()[1:]], "queries and keys come in parts"),
    (attention(), {}, [*qkv()[:2], qkv(length=4)[2]], "queries .8, 1, 4, 4. and keys .* are not"),
    (attention(exchange={"spg": object()}), {}, qkv(), "over another group than the context-pa"),
    (attention(exchange={"scatter_idx": 1}), {}, qkv(), "it exchanges other dimensions than heads"),
    (
        attention(exchange={"gather_size_calculator": UnevenSequence()}),
        {},
        qkv(),
        "a sequence of 15 is not 2 times 8",
    ),
    (attention(), {}, qkv(3, 3), "3 query heads and 3 key heads cannot be shared out evenly"),
    (attention(), {}, qkv(4, 3), "4 query heads and 3 key heads cannot be shared out evenly"),
]


@pytest.mark.parametrize(("attention", "given", "tensors", "reason"), OBSTACLES)
def test_obstacles_by_their_reason(
    attention: Any,
    given: dict[str, Any],
    tensors: list[Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    linears = LinearWrappers()
    ulysses = UlyssesWrappers(linears)
    ulysses.transport = SimpleNamespace(size=2, group=GROUP)  # type: ignore[assignment]
    calls = []
    forward = ulysses.ulysses_forward_wrapper(lambda *args, **kwargs: calls.append((args, kwargs)))
    mask = torch.zeros(1, 1, 15, 15)
    for _ in range(2):
        forward(attention, *tensors, mask, **given)
    assert calls == [((attention, *tensors, mask), given)] * 2
    ((name, found),) = linears.calls
    assert name == "ulysses"
    assert re.search(reason, found), found
    assert linears.calls[name, found] == 2
    assert len(caplog.records) == 1  # said once


def test_lanes_that_were_not_made() -> None:
    ulysses = UlyssesWrappers(LinearWrappers())
    with pytest.raises(RuntimeError, match="the lanes of the context-parallel group do not exist"):
        ulysses.ulysses_forward_wrapper(lambda *args: None)(attention(), *qkv(), None)


@pytest.mark.parametrize(
    ("own", "config", "expected"),
    [(0.3, {"softmax_scale": 0.2}, 0.3), (None, {"softmax_scale": 0.2}, 0.2), (None, {}, None)],
)
def test_the_scale_is_that_of_local_attention(
    own: float | None, config: dict[str, Any], expected: float | None
) -> None:
    core = innermost(attention(config=config, nested=True).local_attn)
    if own is not None:
        core.scale = own
    assert scale_of(core) == expected
