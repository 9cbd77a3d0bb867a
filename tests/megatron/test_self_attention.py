"""Megatron's self-attention, fused: with its projection, and with the exchange of Ulysses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import Schedule
from commfuse_npu.ops import LinearOptions
from commfuse_npu.runtime.collectives import all_gather_rows
from mindspeed_patches import ulysses_layer
from mindspeed_patches.ulysses_layer import (
    WholePositions,
    layer_obstacle,
    qkv_obstacle,
    replaced,
)
from tests.distributed.ranks import on_ranks
from tests.megatron.self_attention import (
    DIMENSION,
    Case,
    build,
    call,
    close,
    inputs,
    not_split,
    parallel,
    run,
    wrapped,
)


def compared(rank: int, cases: list[Case]) -> None:
    """Lanes and collectives give the same bits, close to unfused and unsplit; paths are counted."""
    size = dist.get_world_size()
    for case in cases:
        with parallel(case):
            results = []
            for collectives in (False, True):
                with wrapped(case, collectives) as linears:
                    results.append(run(case, size))
                counted(linears.calls, case)
            fused, plain = results
            unfused = run(case.unfused, size)
            assert fused.keys() == plain.keys() == unfused.keys()
            for name, value in fused.items():
                assert torch.equal(value, plain[name]), (name, case)
                # The gradient of a per-head norm is summed over the ranks in other parts.
                if "layernorm" not in name:
                    close(value, unfused[name], case, name)
            if not case.tensor:
                not_split(fused, case)


def counted(calls: Any, case: Case) -> None:
    assert {name for name, path in calls if path == "fused"} == set(case.fused), (calls, case)
    reasons = {name: path for name, path in calls if path != "fused"}
    assert reasons.keys() == case.left.keys(), (calls, case)
    for name, reason in case.left.items():
        assert re.match(reason, reasons[name]), (reasons[name], case)
    if "recompute_granularity" not in case.config:
        assert set(calls.values()) == {1 + case.recompute}, (calls, case)


BIASES = {"add_bias_linear": True}
ONE_LANE = LinearOptions(Schedule(lanes=1))
BF16 = torch.bfloat16
PACKED = Case(documents="packed")
CORE = Case(
    layers=(),
    fused=("ulysses",),
    left={f"{name} of ulysses": f"{name} is not in the list of lay" for name in ("qkv", "proj")},
)
SELECTIVE = {"recompute_granularity": "selective"}
AGAIN = "selective recomputation runs core attention separately"
OF_DATA = r"its mask is that of the data \(--attention-mask-type general"

JOINED = [
    Case(),
    Case(rotary="none", norms=False, mask="no_mask", options=ONE_LANE),
    Case(rotary="tuple", groups=4, config=BIASES),
    Case(recompute=True, config={"add_qkv_bias": True}),
    Case(dtype=BF16),
    Case(heads=6, groups=2, options=ONE_LANE),
    Case(config={"gradient_accumulation_fusion": True}, recompute=True),
    Case(frozen="linear_qkv.weight", config=BIASES),
    Case(frozen="linear_proj.weight", eval=True),
    Case(config={"softmax_scale": 0.2, "rotary_interleaved": True}),
    PACKED,
    replace(PACKED, resets=False),
    replace(PACKED, rotary="tuple", recompute=True, qkv="with norm", config=BIASES),
]


def shared(groups: int) -> dict[str, Any]:
    reason = f"{groups} query groups are not divisible by 2 ranks: key heads are repeated before"
    return {"fused": ("ulysses", "proj"), "left": {"qkv of ulysses": reason}}


NOT_LISTED = "is not in the list of layers to fuse"
PARTLY = [
    Case(groups=1, **shared(1)),
    Case(heads=6, groups=3, recompute=True, **shared(3)),
    replace(
        CORE,
        layers=("qkv", "fc1"),
        fused=("qkv", "ulysses"),
        left={"proj of ulysses": f"proj {NOT_LISTED}"},
    ),
    CORE,
    replace(CORE, groups=1),  # repeated: one group for each of two ranks
    replace(CORE, heads=6, groups=3),  # repeated although there are more than ranks
    replace(CORE, documents="packed", rotary="none", groups=1, recompute=True),
    Case(config=SELECTIVE, fused=("ulysses",), left=dict.fromkeys(CORE.left, AGAIN)),
    Case(general=True, fused=(), left={"ulysses": OF_DATA}),
]

FOUR = [
    Case(heads=8, groups=4, options=LinearOptions(Schedule(lanes=3))),
    Case(heads=4, groups=4, options=ONE_LANE, documents="packed"),
    replace(CORE, heads=8, groups=2, options=LinearOptions(Schedule(lanes=3))),
    replace(CORE, groups=4, options=LinearOptions(Schedule("two_level", lanes=2, node_size=2))),
]

TENSOR = Case(tensor=True, norms=False, fused=("qkv", "attention", "proj"))
ALONE = replace(TENSOR, fused=("qkv", "proj"))

TOGETHER = [
    replace(TENSOR, mask="no_mask"),
    replace(TENSOR, dtype=BF16),
    replace(TENSOR, recompute=True, config={"softmax_scale": 0.2}),
    replace(TENSOR, groups=4, config=BIASES),
    replace(TENSOR, config={"attention_dropout": 0.1}, eval=True),
    replace(ALONE, general=True, recompute=True, left={"attention": OF_DATA}),
    replace(ALONE, config=SELECTIVE, left={"attention": AGAIN}),
    replace(ALONE, mask="padding", left={"attention": "its mask is padding; only causal and no_m"}),
    replace(
        ALONE,
        config={"sequence_parallel": False},
        fused=("proj",),
        left={
            "attention": "without sequence parallelism nothing is split",
            "qkv": "without sequence parallelism the forward has no transfer",
        },
    ),
    replace(
        ALONE,
        layers=("qkv",),
        fused=("qkv",),
        left=dict.fromkeys(("attention", "proj"), f"proj {NOT_LISTED}"),
    ),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, JOINED), (2, PARTLY), (4, FOUR), (2, TOGETHER)],
    ids=["joined", "partly joined", "four ranks", "with its projection"],
)
def test_fused_plain_unfused_and_not_split(ranks, size: int, cases: list[Case]) -> None:
    ranks(size).run(compared, cases)


@on_ranks(2)
def test_reasons_of_a_layer(rank: int) -> None:
    """Each reason not to fuse a layer, on a real layer."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.attention import SelfAttention

    class OwnQkv(SelfAttention):
        def get_query_key_value_tensors(self, *args: Any) -> Any:
            raise NotImplementedError

    class Adapted(torch.nn.Linear):
        pass

    def said(given: dict[str, Any], **expected: str) -> None:
        found = {
            "layer": layer_obstacle(layer, given),
            "qkv": qkv_obstacle(layer, 8, 2, given),
        }
        assert {name for name, reason in found.items() if reason} == set(expected), found
        assert all(re.search(words, str(found[name])) for name, words in expected.items()), found

    rotary = torch.zeros(8, 1, 1, 8)
    learned = rotary.clone().requires_grad_()
    with parallel(Case()):
        layer = build(Case(), 2)
        linear = layer.linear_qkv
        good = {"attention_mask": None, "rotary_pos_emb": (rotary, None)}
        said(good)
        said({"inference_context": object()}, layer="inference keeps keys of other calls")
        said({"rotary_pos_emb": rotary[:3]}, qkv="embedding has 3 positions for 8 rows")
        for wrong in ([rotary], (None, learned)):
            said({"rotary_pos_emb": wrong}, qkv="its positional embedding is no constant")
        with replaced(layer.config, tensor_model_parallel_size=2):
            said(good, layer="a tensor-parallel group of 2 shares the weights")
        with replaced(layer.config, cpu_offloading=True):
            said(good, layer="cpu_offloading needs")
        someone = "its forward was replaced by someone else"
        with replaced(layer.core_attention, forward=print):
            said(good, layer=someone)
        with replaced(linear, forward=print):
            said(good, qkv=someone)
        with mock.patch.object(linear, "weight", torch.nn.Parameter(linear.weight[1:])):
            said(good, qkv="its weight has not 64 rows for q, k and v")
        linear.__class__ = Adapted
        said(good, qkv="Adapted is not a column-parallel layer that is known")
        linear.__class__ = ColumnParallelLinear
        layer.k_layernorm.weight = torch.nn.Parameter(torch.ones(2 * DIMENSION))
        said(good, qkv="queries or keys are normalized over several heads")
        layer.__class__ = OwnQkv
        said(good, qkv="OwnQkv makes q, k and v in its own way")


@on_ranks(2)
def test_hooks_run_and_nothing_stays_replaced(rank: int) -> None:
    case, called, names = Case(), [], ("linear_qkv", "core_attention", "linear_proj")
    with parallel(case), wrapped(case) as linears:
        layer, (x, _, rows) = build(case, 2), inputs(case, 2)
        for name in names:
            hook = lambda *_, name=name: called.append(name)  # noqa: E731
            getattr(layer, name).register_forward_pre_hook(hook)
        modules = (layer, *(getattr(layer, name) for name in names))
        before = [dict(vars(module)) for module in modules]
        call(case, layer, x, rows)
        assert called == list(names)
        assert [dict(vars(module)) for module in modules] == before
        with pytest.raises(ValueError, match="features"):
            call(case, layer, x[..., 1:], rows)
        assert [dict(vars(module)) for module in modules] == before
        assert ("proj", "fused") in linears.calls


@on_ranks(2)
def test_positions_are_gathered_once_per_tensor(rank: int) -> None:
    gathers = mock.patch.object(ulysses_layer, "all_gather_rows", side_effect=all_gather_rows)
    with parallel(Case()), gathers as gather:
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
