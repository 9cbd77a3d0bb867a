"""Megatron's self-attention whose projections take part in the exchange of heads, or do not."""

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.runtime.collectives import all_gather_rows
from mindspeed_patches import LinearWrappers, ulysses_layer
from mindspeed_patches.patching import replaced
from mindspeed_patches.self_attention import proj_obstacle
from mindspeed_patches.ulysses_layer import (
    WholePositions,
    projections_obstacle,
    qkv_obstacle,
)
from tests.distributed.ranks import on_ranks
from tests.megatron.models import Case, gpt, settings
from tests.megatron.training import Trainer, launched, layout

CASE = Case(context=2, launch="--commfuse-ulysses", norms=True, options={"num_query_groups": 2})


@on_ranks(2)
def test_reasons_of_a_layer(rank: int) -> None:
    """Each reason not to fuse a layer, on a real layer."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention

    class OwnQkv(SelfAttention):
        def get_query_key_value_tensors(self, *args: Any) -> Any:
            raise NotImplementedError

    class Adapted(torch.nn.Linear):
        pass

    def said(given: dict[str, Any], **expected: str) -> None:
        found = {
            "layer": projections_obstacle(layer, given),
            "qkv": qkv_obstacle(layer, 8, 2, given),
            "proj": proj_obstacle(layer.linear_proj),
        }
        assert {name for name, reason in found.items() if reason} == set(expected), found
        assert all(re.search(words, str(found[name])) for name, words in expected.items()), found

    rotary = torch.zeros(8, 1, 1, 8)
    learned = rotary.clone().requires_grad_()
    with layout(CASE):
        layer = gpt(CASE, settings(CASE)).decoder.layers[0].self_attention
        linear, proj = layer.linear_qkv, layer.linear_proj
        good = {"attention_mask": None, "rotary_pos_emb": (rotary, None)}
        said(good)
        said({"inference_context": object()}, layer="inference keeps keys of other calls")
        for wrong in (rotary[:3], (None, learned)):
            said({"rotary_pos_emb": wrong}, qkv="its rotary embedding is trained, or not of the")
        with replaced(layer.config, tensor_model_parallel_size=2):
            said(good, layer="a tensor-parallel group of 2 shares the weights")
        with replaced(layer.core_attention, forward=print):
            said(good, layer="the forward of its core attention was replaced")
        column, row = ("the forward of its ColumnP", "the forward of its RowParallelLinear is not")
        with replaced(linear, forward=print), replaced(proj, forward=print):
            said(good, qkv=column, proj=row)
        linear.__class__ = proj.__class__ = Adapted
        said(good, qkv="the forward of its Adapted is not", proj="the forward of its Adapted")
        linear.__class__, proj.__class__ = ColumnParallelLinear, RowParallelLinear
        layer.__class__ = OwnQkv
        said(good, qkv="OwnQkv makes q, k and v in its own way")


def test_attention_before_an_unknown_projection_is_not_deferred() -> None:
    q, linears = torch.ones(2, 1, 1, 4), LinearWrappers()
    layer = SimpleNamespace(
        core_attention=SimpleNamespace(forward=lambda q, *_: q),
        linear_proj=torch.nn.Linear(1, 1),
        config=SimpleNamespace(attention_dropout=0.0),
        attn_mask_type="causal",
        checkpoint_core_attention=False,
        training=True,
    )
    linears.self_attention_init_wrapper(lambda *_: None)(layer)
    assert layer.core_attention.forward(q, q, q, None) is q
    assert linears.calls == {("attention", "the forward of its Linear is not Megatron's"): 1}


@on_ranks(2)
def test_hooks_run_and_nothing_stays_replaced(rank: int) -> None:
    called, names = [], ("linear_qkv", "core_attention", "linear_proj")
    with layout(CASE), launched(CASE) as (linears, _):
        trainer = Trainer(CASE)
        layer = trainer.models[0].module.decoder.layers[0].self_attention
        for name in names:
            hook = lambda *_, name=name: called.append(name)  # noqa: E731
            getattr(layer, name).register_forward_pre_hook(hook)
        modules = (layer, *(getattr(layer, name) for name in names))
        before = [dict(vars(module)) for module in modules]
        trainer.accumulate()
        assert called == list(names)
        assert [dict(vars(module)) for module in modules] == before
        with pytest.raises(ValueError, match="features"):
            layer(torch.ones(8, 2, 31), None)
        assert [dict(vars(module)) for module in modules] == before
        assert ("proj", "fused") in linears.calls


@on_ranks(2)
def test_positions_are_gathered_once_per_tensor(rank: int) -> None:
    gathers = mock.patch.object(ulysses_layer, "all_gather_rows", side_effect=all_gather_rows)
    with layout(CASE), gathers as gather:
        group, positions = dist.group.WORLD, WholePositions()

        def expect(part: torch.Tensor, total: int) -> None:
            whole = positions.of(part, group)
            assert gather.call_count == total
            assert torch.equal(whole[2 * rank : 2 * rank + 2], part)
            assert not whole.requires_grad

        part = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + rank
        expect(part, 1)
        expect(part.detach(), 1)  # as recomputation passes it
        expect(part.t(), 2)  # the same memory with other strides
        part += 1
        expect(part, 3)
        for number in range(4, 11):  # memory is freed and reused by another tensor
            expect(torch.full((2, 2), float(number)), number)
        expect(part, 11)  # forgotten
        positions.of((part, None), dist.new_group([0, 1]))
        assert gather.call_count == 12  # of another group
        with torch.inference_mode():
            unseen = torch.ones(2, 2)
            expect(unseen, 13)
            expect(unseen.add_(1), 14)
