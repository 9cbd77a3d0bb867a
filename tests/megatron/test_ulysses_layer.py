"""Megatron's self-attention under Ulysses: both projections in the exchange, one, and none."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import Schedule
from commfuse_npu.ops import LinearOptions, head_groups
from mindspeed_patches import LinearWrappers, whole_positions
from mindspeed_patches.ulysses_exchange import rows_to_heads
from mindspeed_patches.ulysses_layer import (
    forward_arguments,
    layer_obstacle,
    proj_obstacle,
    qkv_obstacle,
    replaced,
)
from mindspeed_patches.whole_positions import WholePositions
from mindspeed_patches.wrappers import LAYERS
from tests.attention_masks import ends_of, seen
from tests.distributed.test_ulysses import note_order
from tests.megatron import test_ulysses
from tests.megatron.test_ulysses import all_ranks, lanes

LENGTH, BATCH, DIMENSION, HIDDEN = 16, 2, 8, 24
ALL = ("qkv", "ulysses", "proj")


@dataclass(frozen=True)
class Case:
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
    """Handed on ``packed``, as MindSpeed does, or as a whole ``mask``, as Megatron understands."""
    resets: bool = True


class NormColumn(torch.nn.Module):
    """What MindSpeed's layer with the norm in front does, as far as the wrappers see it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from megatron.core.tensor_parallel import layers

        super().__init__()
        column = layers.ColumnParallelLinear(*args, **kwargs)
        self.weight, self.bias = column.weight, column.bias
        self.gradient_accumulation_fusion = column.gradient_accumulation_fusion
        self.norm_weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))
        self._linear_forward_impl = layers.linear_with_grad_accumulation_and_async_allreduce

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        y = self._linear_forward_impl(
            input=torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm_weight),
            weight=self.weight,
            bias=self.bias,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            grad_output_buffer=None,
            wgrad_deferral_limit=None,
        )
        return y, None


def build(case: Case, context_parallel: int) -> Any:
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
        "context_parallel_size": context_parallel,
        "use_cpu_initialization": True,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "attention_softmax_in_fp32": True,
        "apply_query_key_layer_scaling": False,
        "apply_rope_fusion": False,
        "init_method_std": 0.3,
    }
    torch.manual_seed(3)
    norm = RMSNorm if case.norms else None
    layer = SelfAttention(
        TransformerConfig(**(settings | case.config)),
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear if case.qkv == "ColumnParallelLinear" else NormColumn,
            core_attention=UlyssesAttention if context_parallel > 1 else DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
        layer_number=1,
        attn_mask_type=getattr(AttnMaskType, case.mask),
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # no bias of 0, no norm of 1
    if case.frozen:
        layer.get_parameter(case.frozen).requires_grad_(False)
    if case.documents == "packed":
        for config in (layer.config, getattr(layer.core_attention, "local_attn", layer).config):
            config.reset_attention_mask, config.reset_position_ids = True, case.resets
    if layer.config.gradient_accumulation_fusion:
        for linear in (layer.linear_qkv, layer.linear_proj):
            linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
    return layer.train(not case.eval)


def positions(case: Case, rows: slice) -> Any:
    """Angles of these rows of the sequence, ``[s, 1, 1, D]``, in the forms that Megatron takes."""
    if case.rotary == "none":
        return None
    angles = torch.outer(torch.arange(LENGTH).float(), 10.0 ** -torch.arange(0, 1, 2 / DIMENSION))
    angles = torch.cat([angles, angles], dim=-1)[:, None, None][rows]
    return (angles, 0.5 * angles) if case.rotary == "tuple" else angles


def own_rows(context_parallel: int) -> slice:
    rows = LENGTH // context_parallel
    rank = dist.get_rank() if context_parallel > 1 else 0
    return slice(rank * rows, (rank + 1) * rows)


def numbered(case: Case) -> torch.Tensor:
    """``[S, B]``: the position of each token, in its document if they are reset."""
    before, found = 0, torch.arange(LENGTH).repeat(BATCH)
    for end in ends_of("documents", LENGTH, BATCH) if case.resets else ():
        found[before:end] = torch.arange(end - before)
        before = end
    return found.view(BATCH, LENGTH).t().contiguous()


def with_documents(case: Case, layer: Any, x: torch.Tensor, rows: slice) -> torch.Tensor:
    angles, number = positions(case, slice(None)), numbered(case)
    if case.documents == "packed":
        ends = torch.tensor(ends_of("documents", LENGTH, BATCH))
        packed = SimpleNamespace(cu_seqlens_q=ends, position_ids=number[rows].contiguous())
        y, bias = layer(x, None, rotary_pos_emb=angles, packed_seq_params=packed)
    else:
        both = angles if isinstance(angles, tuple) else (angles, angles)
        picked = tuple(part[number[rows].flatten()].view(-1, BATCH, 1, DIMENSION) for part in both)
        y, bias = layer(x, ~seen("documents", LENGTH, BATCH), rotary_pos_emb=picked)
    return y if bias is None else y + bias


def call(case: Case, layer: Any, x: torch.Tensor, rows: slice, angles: Any = None) -> torch.Tensor:
    if case.documents:
        return with_documents(case, layer, x, rows)
    mask = None
    if case.mask == "causal":
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    angles = positions(case, rows) if angles is None else angles
    y, bias = layer(x, mask, rotary_pos_emb=angles)
    return y if bias is None else y + bias


def run(case: Case, context_parallel: int) -> dict[str, torch.Tensor]:
    """Output and all gradients, of this rank's rows."""
    from megatron.core.tensor_parallel import checkpoint

    layer, rows = build(case, context_parallel), own_rows(context_parallel)
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(LENGTH, BATCH, HIDDEN, generator=generator) for _ in range(2))
    x, grad = (whole[rows].to(case.dtype) for whole in (x, grad))
    x.requires_grad_()
    if case.eval:
        with torch.no_grad():
            return {"y": call(case, layer, x, rows)}

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return call(case, layer, hidden, rows)

    y = checkpoint(forward, False, x) if case.recompute else forward(x)
    y.backward(grad)
    found = {"y": y.detach(), "x.grad": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            found[f"{name}.grad"] = gradient
    return found


def wrapped(case: Case, form: str = "fused") -> AbstractContextManager[LinearWrappers]:
    return test_ulysses.wrapped(case.options, form, case.layers)


def close(found: torch.Tensor, expected: torch.Tensor, case: Case, what: str) -> None:
    tolerance = 4e-2 if case.dtype == torch.bfloat16 else 1e-5
    largest = float(expected.abs().max())
    assert largest > 0, what
    difference = float((found.float() - expected.float()).abs().max())
    assert difference <= tolerance * largest, f"{what}: {difference} of {largest} in {case}"


def by_mask(case: Case) -> Case:
    """The same documents, for Megatron's own attention."""
    return replace(case, documents="mask") if case.documents else case


def close_to_not_split(found: dict[str, torch.Tensor], case: Case) -> None:
    """Rows are those of one process with all of them; gradients of parameters are their sums."""
    case = by_mask(case)
    size = dist.get_world_size()
    whole, rows = run(case, 1), own_rows(size)
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        expected = whole[name]
        if name in ("y", "x.grad"):
            expected = expected[rows]
        else:
            tensor = tensor.float()
            dist.all_reduce(tensor)
        close(tensor, expected, case, name)


def compared(rank: int, cases: list[Case]) -> None:
    size = dist.get_world_size()
    with all_ranks():
        for case in cases:
            results = {}
            for form in ("fused", "plain"):
                with wrapped(case, form) as linears:
                    results[form] = run(case, size)
                    calls = dict.fromkeys(((name, form) for name in ALL), 1 + case.recompute)
                    assert linears.calls == calls, case
            unfused = run(by_mask(case), size)
            for name, fused in results["fused"].items():
                assert torch.equal(fused, results["plain"][name]), (name, case)
                # Of a norm per head the ranks have other summands of the same sum.
                if "layernorm" not in name:
                    close(fused, unfused[name], case, name)
            close_to_not_split(results["fused"], case)


def test_fused_plain_unfused_and_not_split(ranks) -> None:
    biases = {"add_bias_linear": True}
    cases = [
        Case(),
        Case(rotary="none", norms=False, mask="no_mask", options=LinearOptions(Schedule(lanes=1))),
        Case(rotary="tuple", groups=4, config=biases),
        Case(recompute=True, config={"add_qkv_bias": True}),
        Case(dtype=torch.bfloat16),
        Case(heads=6, groups=2, options=LinearOptions(Schedule(lanes=1), wgrad="blocks")),
        Case(config={"gradient_accumulation_fusion": True}, recompute=True),
        Case(qkv="with norm", config=biases),
        Case(frozen="linear_qkv.weight", config=biases),
        Case(frozen="linear_proj.weight"),
        Case(eval=True),
        Case(config={"softmax_scale": 0.2, "rotary_interleaved": True}),
    ]
    ranks(2).run(compared, cases)


def test_packed_documents(ranks) -> None:
    packed = Case(documents="packed")
    cases = [
        packed,
        replace(packed, resets=False),
        replace(packed, rotary="tuple", recompute=True),
        replace(packed, qkv="with norm", config={"add_bias_linear": True}),
        replace(packed, dtype=torch.bfloat16),
    ]
    ranks(2).run(compared, cases)


def test_four_ranks(ranks) -> None:
    cases = [
        Case(heads=8, groups=4, options=LinearOptions(Schedule(lanes=3))),
        Case(heads=4, groups=4, options=LinearOptions(Schedule(lanes=1))),
        Case(heads=4, groups=4, documents="packed"),
    ]
    ranks(4).run(compared, cases)


# ------------------------------------------------------- what joins, and what not


def partly(rank: int, case: Case) -> list[tuple[str, str]]:
    size = dist.get_world_size()
    with all_ranks():
        results, calls = {}, []
        for form in ("fused", "plain"):
            with wrapped(case, form) as linears:
                results[form] = run(case, size)
                assert set(linears.calls.values()) == {1 + case.recompute}
                calls.append(sorted((name, path) for name, path in linears.calls))
        assert results["fused"].keys() == results["plain"].keys()
        for name, tensor in results["fused"].items():
            assert torch.equal(tensor, results["plain"][name]), name
        close_to_not_split(results["fused"], case)
        return calls[0]


SELECTIVE = "selective recomputation runs the core attention by itself"
PARTS = {
    "MQA": (
        Case(groups=1),
        ["ulysses", "proj"],
        {"qkv": "1 query groups are not divisible by 2 ranks: key heads are repeated before"},
    ),
    "three groups": (
        Case(heads=6, groups=3, recompute=True),
        ["ulysses", "proj"],
        {"qkv": "3 query groups are not divisible by 2 ranks"},
    ),
    "qkv only": (
        Case(layers=("qkv", "fc1")),
        ["qkv", "ulysses"],
        {"proj": "proj is not in the list of layers to fuse"},
    ),
    "proj only": (
        Case(layers=("proj",)),
        ["ulysses", "proj"],
        {"qkv": "qkv is not in the list of layers to fuse"},
    ),
    "none": (
        Case(layers=()),
        ["ulysses"],
        {"qkv": "qkv is not in the list", "proj": "proj is not in the list"},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_cannot_join_leaves_the_rest_fused(ranks, name: str) -> None:
    case, fused, left = PARTS[name]
    for calls in ranks(2).run(partly, case):
        assert {layer for layer, path in calls if path == "fused"} == set(fused)
        reasons = {layer: path for layer, path in calls if path != "fused"}
        assert reasons.keys() == {f"{layer} of ulysses" for layer in left}
        for layer, reason in left.items():
            assert re.match(reason, reasons[f"{layer} of ulysses"])


def selective_recomputation(rank: int) -> set[tuple[str, str]]:
    case = Case(config={"recompute_granularity": "selective"})
    with all_ranks(), wrapped(case) as linears:
        found = run(case, 2)
        close_to_not_split(found, case)
        return set(linears.calls)


def test_core_attention_that_is_recomputed_by_itself(ranks) -> None:
    expected = {("ulysses", "fused"), ("qkv of ulysses", SELECTIVE), ("proj of ulysses", SELECTIVE)}
    assert ranks(2).run(selective_recomputation) == [expected] * 2


def what_attention_refuses(rank: int) -> set[tuple[str, str]]:
    case = Case(config={"attention_dropout": 0.1})
    with all_ranks(), wrapped(case) as linears:
        assert all(torch.isfinite(tensor).all() for tensor in run(case, 2).values())
        return set(linears.calls)


def test_without_fused_attention_no_projection_joins(ranks) -> None:
    expected = {("ulysses", "attention dropout is 0.1")}
    assert ranks(2).run(what_attention_refuses) == [expected] * 2


def reasons(rank: int) -> None:
    """Each reason of a layer, on a real one."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention

    class OwnQkv(SelfAttention):
        def get_query_key_value_tensors(self, *args: Any) -> Any:
            raise NotImplementedError

    class Adapted(torch.nn.Linear):
        pass

    def qkv(given: dict[str, Any], layers: tuple[str, ...] = LAYERS, rows: int = 8) -> str | None:
        return qkv_obstacle(layer, rows, 2, given, layers)

    def said(found: str | None, expected: str) -> None:
        assert found is not None
        assert re.search(expected, found), found

    rotary = torch.zeros(8, 1, 1, 8)
    with all_ranks():
        layer = build(Case(), 2)
        good = {"attention_mask": None, "rotary_pos_emb": (rotary, None)}
        assert layer_obstacle(layer, good) is qkv(good) is proj_obstacle(layer, LAYERS) is None
        for name in ("inference_context", "inference_params"):
            said(layer_obstacle(layer, {name: object()}), "inference keeps keys of other calls")
        said(qkv({"rotary_pos_cos": rotary}), "cosine and sine of the positions are given apart")
        said(qkv({"rotary_pos_emb": rotary[:3]}), "embedding has 3 positions for 8 rows")
        said(qkv({"rotary_pos_emb": [rotary]}), "its positional embedding is no constant")
        learned = rotary.clone().requires_grad_()
        said(qkv({"rotary_pos_emb": (None, learned)}), "its positional embedding is no constant")
        for name, value, reason in (
            ("tensor_model_parallel_size", 2, "a tensor-parallel group of 2 shares the weights"),
            ("cpu_offloading", True, "cpu_offloading needs"),
        ):
            with replaced(layer.config, **{name: value}):
                said(layer_obstacle(layer, good), reason)
        with replaced(layer.linear_qkv, gather_output=True):
            said(qkv(good), "its output or its bias is wanted apart")
        with replaced(layer.linear_proj, input_is_parallel=False):
            said(proj_obstacle(layer, LAYERS), "the input has to be scattered first")
        replacement = "its forward was replaced by someone else"
        with replaced(layer.core_attention, forward=print):
            said(layer_obstacle(layer, good), replacement)
        with replaced(layer.linear_qkv, forward=print), replaced(layer.linear_proj, forward=print):
            said(qkv(good), replacement)
            said(proj_obstacle(layer, LAYERS), replacement)
        weight = layer.linear_qkv.weight
        layer.linear_qkv.weight = torch.nn.Parameter(weight[1:])
        said(qkv(good), "its weight has not 64 rows for q, k and v")
        layer.linear_qkv.weight = weight
        layer.linear_proj.weight = torch.nn.Parameter(torch.zeros(HIDDEN, 7))
        said(proj_obstacle(layer, LAYERS), "its weight has not 32 columns")
        layer.linear_qkv.__class__ = layer.linear_proj.__class__ = Adapted
        said(qkv(good), "Adapted is not a column-parallel layer that is known")
        said(proj_obstacle(layer, LAYERS), "Adapted is not Megatron's row-parallel layer")
        layer.linear_qkv.__class__ = ColumnParallelLinear
        layer.linear_proj.__class__ = RowParallelLinear
        layer.k_layernorm.weight = torch.nn.Parameter(torch.ones(2 * DIMENSION))
        said(qkv(good), "queries or keys are normalized over several heads")
        layer.__class__ = OwnQkv
        said(qkv(good), "OwnQkv makes q, k and v in its own way")


def test_reasons_of_a_layer(ranks) -> None:
    ranks(2).run(reasons)


def a_mask_that_changes_between(rank: int) -> set[tuple[str, str]]:
    """The heads are exchanged, and only then is attention more than can be fused."""
    from megatron.core.transformer.enums import AttnMaskType

    case = Case()
    with all_ranks():
        with wrapped(case) as linears:
            layer, rows = build(case, 2), own_rows(2)
            layer.linear_qkv.register_forward_hook(
                lambda *_: setattr(layer, "attn_mask_type", AttnMaskType.padding)
            )
            x = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(5))
            y = call(case, layer, x[rows], rows)
        # The same rows, as megatron-core masks by the mask that it is given.
        close(y, run(replace(case, eval=True), 1)["y"][rows], case, "y")
        return set(linears.calls)


def test_attention_that_turns_out_to_be_more(ranks) -> None:
    reason = "its mask is padding; only causal and no_mask can be split by queries"
    expected = {("qkv", "fused"), ("ulysses", reason)}
    assert ranks(2).run(a_mask_that_changes_between) == [expected] * 2


# ---------------------------------------------------------------- how it is done


def hooks_and_what_is_left_behind(rank: int) -> None:
    case, seen = Case(), []
    with all_ranks(), wrapped(case) as linears:
        layer, rows = build(case, 2), own_rows(2)
        modules = (layer, layer.linear_qkv, layer.core_attention, layer.linear_proj)
        for name in ("linear_qkv", "core_attention", "linear_proj"):
            module = getattr(layer, name)
            module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
        before = [dict(vars(module)) for module in modules]
        x = torch.zeros(LENGTH // 2, BATCH, HIDDEN)
        call(case, layer, x, rows)
        assert seen == ["linear_qkv", "core_attention", "linear_proj"]
        assert [dict(vars(module)) for module in modules] == before
        with pytest.raises(ValueError, match="features"):
            call(case, layer, x[..., 1:], rows)
        assert [dict(vars(module)) for module in modules] == before
        assert ("proj", "fused") in linears.calls


def test_hooks_run_and_nothing_stays_replaced(ranks) -> None:
    ranks(2).run(hooks_and_what_is_left_behind)


def recorded(rank: int) -> tuple[list[str], list[str]]:
    """What is done in a forward and in a backward, in order."""
    case, events = Case(options=LinearOptions(Schedule(lanes=1))), []
    with all_ranks(), wrapped(case), pytest.MonkeyPatch.context() as patch:
        layer, rows = build(case, 2), own_rows(2)
        x = torch.randn(LENGTH // 2, BATCH, HIDDEN).requires_grad_()
        call(case, layer, x, rows)  # the ranks compare what they do, once
        note_order(patch, events)
        y = call(case, layer, x, rows)
        forward = list(events)
        events.clear()
        y.sum().backward()
    return forward, events


def test_blocks_are_sent_before_the_last_one_is_computed(ranks) -> None:
    qkv = ["gemm", "send", "gemm", "wait"]
    attention_and_proj = ["attend", "send", "attend", "gemm", "wait", "gemm"]
    proj_and_attention = ["gemm", "send", "gemm", "wgrad", "attend", "wait", "attend"]
    grad_qkv = ["send", "gemm", "wait", "gemm", "wgrad"]
    for forward, backward in ranks(2).run(recorded):
        assert forward == qkv + attention_and_proj
        assert backward == proj_and_attention + grad_qkv


# -------------------------------------------------------- norms and positions


def on_either_side(rank: int, dtype: torch.dtype) -> None:
    """Norms and rotary embedding before the exchange, and after it."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    size = dist.get_world_size()
    with all_ranks():
        group = lanes(size).group
        for case in (Case(), Case(config={"rotary_interleaved": True})):
            layer, rows = build(replace(case, dtype=dtype), size), own_rows(size)
            generator = torch.Generator().manual_seed(rank)
            shape = (LENGTH // size, BATCH, 3 * size, DIMENSION)
            q, k = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))

            def per_head(
                q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor, layer: Any = layer
            ) -> list[torch.Tensor]:
                normed = layer.q_layernorm(q), layer.k_layernorm(k)
                return [apply_rotary_pos_emb(x, angles, config=layer.config) for x in normed]

            angles = positions(case, rows)
            before = rows_to_heads(*per_head(q, k, angles), q, group)
            whole = WholePositions().of(angles, group)
            assert torch.equal(whole, positions(case, slice(None)))
            after = per_head(*rows_to_heads(q, k, q, group)[:2], whole)
            for one, other in zip(before, after, strict=False):
                assert torch.equal(one, other)
                assert not torch.equal(one, rows_to_heads(q, k, q, group)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_positions_are_the_same_bits_on_either_side(ranks, dtype: torch.dtype) -> None:
    ranks(2).run(on_either_side, dtype)
    ranks(4).run(on_either_side, dtype)


def counted_gathers() -> Any:
    original = whole_positions.all_gather_rows
    return mock.patch.object(whole_positions, "all_gather_rows", side_effect=original)


def gathers(rank: int) -> None:
    with all_ranks(), counted_gathers() as gather:
        group = lanes(2).group
        known = WholePositions()

        def expect(part: torch.Tensor, total: int) -> None:
            whole = known.of(part, group)
            assert gather.call_count == total
            rows = whole[2 * rank : 2 * rank + 2]
            assert torch.equal(rows, part)
            assert not whole.requires_grad

        part = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + rank
        expect(part, 1)
        expect(part, 1)
        expect(part.detach(), 1)  # as recomputation passes it
        expect(part.t(), 2)  # the same memory, read otherwise
        expect(part.bfloat16(), 3)
        part += 1
        expect(part, 4)
        expect(part.detach(), 4)
        for number in range(5, 12):  # freed memory that another tensor gets
            expect(torch.full((2, 2), float(number)), number)
        expect(part, 12)  # forgotten
        known.of(torch.zeros(2, 2), dist.new_group([0, 1]))
        assert gather.call_count == 13
        expect(part, 14)  # of another group
        with torch.inference_mode():
            unseen = torch.ones(2, 2)
            expect(unseen, 15)
            expect(unseen.add_(1), 16)


def test_positions_are_gathered_once_per_tensor(ranks) -> None:
    ranks(2).run(gathers)


def gathers_of_layers(rank: int) -> int:
    """Three layers, one of them recomputed, two iterations."""
    from megatron.core.tensor_parallel import checkpoint

    case = Case()
    with all_ranks(), wrapped(case), counted_gathers() as gather:
        layer, rows = build(case, 2), own_rows(2)
        angles = positions(case, rows)
        for _ in range(2):
            x = torch.randn(LENGTH // 2, BATCH, HIDDEN).requires_grad_()
            x = call(case, layer, call(case, layer, x, rows, angles), rows, angles)

            def forward(hidden: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
                return call(case, layer, hidden, rows, emb)

            checkpoint(forward, False, x, angles).sum().backward()
        return int(gather.call_count)


def test_all_layers_and_recomputation_share_what_is_gathered(ranks) -> None:
    assert ranks(2).run(gathers_of_layers) == [1, 1]


def test_what_a_forward_is_given() -> None:
    assert forward_arguments((1, 2), {"rotary_pos_emb": 3}) == {
        "attention_mask": 1,
        "key_value_states": 2,
        "rotary_pos_emb": 3,
    }
    with pytest.raises(ValueError, match="longer"):
        forward_arguments(tuple(range(10)), {})


# ---------------------------------------------------------------- planted faults


def positions_of_the_own_rows(patch: pytest.MonkeyPatch) -> None:
    def own(self: WholePositions, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return torch.cat([part] * group.size())

    patch.setattr(WholePositions, "of", own)


def heads_of_the_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    take = head_groups.HeadRows.take
    patch.setattr(
        head_groups.HeadRows, "take", lambda self, weight, group: take(self, weight, 1 - group)
    )


def the_scale_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("mindspeed_patches.ulysses.scale_of", lambda core: 0.3)


def planted(rank: int, name: str) -> None:
    case = Case()
    with all_ranks(), pytest.MonkeyPatch.context() as patch:
        FAULTS[name](patch)
        with wrapped(case):
            found = run(case, 2)
        patch.undo()
        try:
            close_to_not_split(found, case)
        except AssertionError:
            return
        raise AssertionError(f"nobody noticed {name}")


FAULTS = {
    fault.__name__: fault
    for fault in (positions_of_the_own_rows, heads_of_the_wrong_rank, the_scale_of_another_layer)
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(ranks, name: str) -> None:
    ranks(2).run(planted, name)
