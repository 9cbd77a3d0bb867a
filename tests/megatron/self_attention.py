"""Megatron's self-attention and its surroundings, fused and unfused, in the ranks of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from mindspeed_patches import LAYERS, LinearWrappers
from mindspeed_patches.attention import AttentionWrappers
from mindspeed_patches.ulysses import UlyssesWrappers
from tests.attention_masks import ends_of, seen
from tests.limits import PATIENT
from tests.megatron.in_ranks import WITHOUT_KERNELS, NormColumn, megatron, patched

LENGTH, BATCH, DIMENSION, HIDDEN = 16, 2, 8, 24
EXCHANGE = "scripts.cpu_pretraining.ulysses.UlyssesAttention"


@dataclass(frozen=True)
class Case:
    """A layer, its call, and which parts of it are fused.

    Attributes:
        tensor: the ranks are a tensor-parallel group with sequence parallelism, else they share the
            sequence and exchange heads.
        documents: passed ``packed``, as MindSpeed does, or as a full ``mask``, as Megatron expects.
        general: Megatron uses the mask of the data, as with ``--attention-mask-type general``.
        fused: what is fused; ``left``: what is not, with the beginning of its reason.
    """

    tensor: bool = False
    heads: int = 4
    groups: int = 2
    mask: str = "causal"
    dtype: torch.dtype = torch.float32
    rotary: str = "tensor"
    norms: bool = True
    qkv: str = "ColumnParallelLinear"
    frozen: str = ""
    recompute: bool = False
    eval: bool = False
    layers: tuple[str, ...] = LAYERS
    options: LinearOptions = LinearOptions(Schedule(lanes=1, chunks=2))
    config: dict[str, Any] = field(default_factory=dict)
    documents: str = ""
    resets: bool = True
    general: bool = False
    fused: tuple[str, ...] = ("qkv", "ulysses", "proj")
    left: dict[str, str] = field(default_factory=dict)

    @property
    def unfused(self) -> Case:
        """The case with the same documents for Megatron's own attention."""
        return replace(self, documents="mask") if self.documents else self


def parallel(case: Case) -> AbstractContextManager[None]:
    """Megatron with all ranks in one group."""
    size = dist.get_world_size()
    lanes(size)  # before Megatron's groups, which are destroyed afterwards
    return megatron(size) if case.tensor else megatron(context_parallel=size)


@lru_cache
def lanes(size: int) -> Transport:
    return Transport.create(lanes=3, timeout=PATIENT)


@contextmanager
def wrapped(case: Case, collectives: bool = False) -> Iterator[LinearWrappers]:
    """Wraps the layer, over lanes or over collectives; yields the wrappers that count calls."""
    from megatron.core import parallel_state

    user: Any = LinearWrappers(case.options, case.layers)
    linears, register = user, [user.register]
    if case.tensor:
        register.append(AttentionWrappers(linears).register)
        group = parallel_state.get_tensor_model_parallel_group()
    else:
        user = UlyssesWrappers(linears, case.options)
        register = [lambda manager: user.register(manager, EXCHANGE)]
        group = parallel_state.get_context_parallel_group()
    user.transport = lanes(dist.get_world_size())
    # Lanes of another test over the same ranks are reused, whatever group they were created for.
    user.transport.group = group
    if collectives:
        user.transport = CollectiveTransport(group, same_pieces=True)
    with patched(*register):
        yield linears


def build(case: Case, size: int) -> Any:
    """The layer of a rank in a group of ``size``."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from scripts.cpu_pretraining.model import RMSNorm
    from scripts.cpu_pretraining.ulysses import UlyssesAttention

    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "kv_channels": DIMENSION,
        "num_attention_heads": case.heads,
        "num_query_groups": case.groups,
        "context_parallel_size": 1 if case.tensor else size,
        "tensor_model_parallel_size": size if case.tensor else 1,
        "sequence_parallel": case.tensor,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "init_method_std": 0.3,
        **WITHOUT_KERNELS,
    }
    torch.manual_seed(3)
    norm = RMSNorm if case.norms else None
    exchanges = size > 1 and not case.tensor
    layer = SelfAttention(
        TransformerConfig(**(settings | case.config)),
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear if case.qkv == "ColumnParallelLinear" else NormColumn,
            core_attention=UlyssesAttention if exchanges else DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
        layer_number=1,
        attn_mask_type=getattr(AttnMaskType, case.mask),
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # no bias is 0, no norm weight is 1
    if case.frozen:
        layer.get_parameter(case.frozen).requires_grad_(False)
    for config in (layer.config, getattr(layer.core_attention, "local_attn", layer).config):
        if case.documents == "packed":
            config.reset_attention_mask, config.reset_position_ids = True, case.resets
        if case.general:
            config.attention_mask_type = "general"
    if layer.config.gradient_accumulation_fusion:
        for linear in (layer.linear_qkv, layer.linear_proj):
            linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
    return layer.train(not case.eval)


def own_rows(size: int) -> slice:
    """This rank's rows of a sequence that ``size`` ranks share."""
    rows = LENGTH // size
    rank = dist.get_rank() if size > 1 else 0
    return slice(rank * rows, (rank + 1) * rows)


def positions(case: Case, rows: slice) -> Any:
    """Angles of these rows of the sequence, ``[s, 1, 1, D]``, in the forms that Megatron takes."""
    if case.rotary == "none":
        return None
    angles = torch.outer(torch.arange(LENGTH).float(), 10.0 ** -torch.arange(0, 1, 2 / DIMENSION))
    angles = torch.cat([angles, angles], dim=-1)[:, None, None][rows]
    return (angles, 0.5 * angles) if case.rotary == "tuple" else angles


def _numbered(case: Case) -> torch.Tensor:
    """Position of each token ``[S, B]``, within its document if positions are reset."""
    before, numbers = 0, torch.arange(LENGTH).repeat(BATCH)
    for end in ends_of("documents", LENGTH, BATCH) if case.resets else ():
        numbers[before:end] = torch.arange(end - before)
        before = end
    return numbers.view(BATCH, LENGTH).t().contiguous()


def call(case: Case, layer: Any, x: torch.Tensor, rows: slice, angles: Any = None) -> torch.Tensor:
    """Output with its bias, of these rows of the sequence."""
    arguments: dict[str, Any] = {}
    if not case.documents:
        arguments["rotary_pos_emb"] = positions(case, rows) if angles is None else angles
    else:
        angles, number = positions(case, slice(None)), _numbered(case)[rows].contiguous()
        if case.documents == "packed":
            ends = torch.tensor(ends_of("documents", LENGTH, BATCH))
            packed = SimpleNamespace(cu_seqlens_q=ends, position_ids=number, qkv_format="sbhd")
            arguments = {"rotary_pos_emb": angles, "packed_seq_params": packed}
        elif angles is not None:
            tables = angles if isinstance(angles, tuple) else (angles, angles)
            arguments["rotary_pos_emb"] = tuple(
                part[number.flatten()].view(-1, BATCH, 1, DIMENSION) for part in tables
            )
    mask = None
    if case.general or case.documents == "mask":
        mask = ~seen("documents", LENGTH, BATCH)
    elif case.mask == "causal" and not case.documents:
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    y, bias = layer(x, mask, **arguments)
    return y if bias is None else y + bias


def inputs(case: Case, size: int) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """Hidden states, the gradient of the output, and the rows that positions belong to."""
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(LENGTH, BATCH, HIDDEN, generator=generator) for _ in range(2))
    sharded = case.config.get("sequence_parallel", True) if case.tensor else True
    rows = own_rows(size if sharded else 1)
    x, grad = (whole[rows].to(case.dtype) for whole in (x, grad))
    return x.requires_grad_(), grad, slice(None) if case.tensor else rows


def run(case: Case, size: int) -> dict[str, torch.Tensor]:
    """Output and all gradients."""
    from megatron.core.tensor_parallel import checkpoint

    layer, (x, grad, rows) = build(case, size), inputs(case, size)
    if case.eval:
        with torch.no_grad():
            return {"y": call(case, layer, x, rows)}

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return call(case, layer, hidden, rows)

    y = checkpoint(forward, False, x) if case.recompute else forward(x)
    y.backward(grad)
    results = {"y": y.detach(), "x.grad": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            results[f"{name}.grad"] = gradient
    return results


def close(found: torch.Tensor, expected: torch.Tensor, case: Case, what: str) -> None:
    """Differences are within the rounding of the dtype, relative to the largest number."""
    tolerance = 4e-2 if case.dtype == torch.bfloat16 else 1e-5
    largest = float(expected.abs().max())
    assert largest > 0, what
    difference = float((found.float() - expected.float()).abs().max())
    assert difference <= tolerance * largest, f"{what}: {difference} of {largest} in {case}"


def not_split(found: dict[str, torch.Tensor], case: Case) -> None:
    """Rows equal those of one process with the whole sequence; weight gradients are summed."""
    whole, rows = run(case.unfused, 1), own_rows(dist.get_world_size())
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        expected = whole[name]
        if name in ("y", "x.grad"):
            expected = expected[rows]
        else:
            tensor = tensor.float()
            dist.all_reduce(tensor)
        close(tensor, expected, case, name)
