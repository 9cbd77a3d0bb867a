"""The doctor expects what the wrappers around Megatron's layers do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from commfuse_npu.tools.doctor import Launch
from commfuse_npu.tools.doctor.layers import ATTENTION_OPERATOR, FusedLayer, fused_layers
from commfuse_npu.tools.linear_layers import attention_obstacle
from mindspeed_patches import wrappers
from mindspeed_patches.attention import AttentionWrappers
from tests.tools.doctor.launches import FUSED, SIZES, launch


def wrapped(monkeypatch, made: Launch) -> tuple[wrappers.LinearWrappers, list[tuple[object, ...]]]:
    """The wrappers of a launch, with operators that only say their name and what they are given."""
    called: list[tuple[object, ...]] = []
    for name in (
        *("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"),
        "attention_linear_reduce_scatter",
    ):

        def operator(x: torch.Tensor, *others: torch.Tensor, op=name, **__: object):
            called.append((op, tuple(x.shape), tuple(others[0].shape)))
            return x

        monkeypatch.setattr(wrappers, name, operator)
    layers, least = made.fuse.commfuse_layers, made.least_rows
    found = wrappers.LinearWrappers(layers=layers, min_rows=least)
    tp = made.config.tensor_model_parallel_size
    found.transport = SimpleNamespace(size=tp)  # type: ignore[assignment]
    return found, called


def linear(made: Launch, found: FusedLayer, **others: object) -> SimpleNamespace:
    """A layer as it would arrive at the wrappers."""
    return SimpleNamespace(
        commfuse_layer=found.layer,
        weight=torch.empty(found.weight_shape, dtype=torch.bfloat16),
        bias=None,
        skip_bias_add=False,
        sequence_parallel=made.config.uses_sequence_parallel,
        gather_output=False,
        input_is_parallel=True,
        is_expert=False,
        explicit_expert_comm=False,
        disable_grad_reduce=False,
        gradient_accumulation_fusion=False,
        output_size_per_partition=found.weight_shape[0],
        input_size=found.weight_shape[1],
        config=SimpleNamespace(
            defer_embedding_wgrad_compute=False, cpu_offloading=False, attention_dropout=0.0
        ),
        **others,
    )


def own(layer: SimpleNamespace, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, None]:
    return x, None


@pytest.mark.parametrize(
    "words",
    [
        FUSED,
        f"{SIZES} --use-commfuse --bf16 --commfuse-min-rows 0",
        f"{FUSED} --commfuse-min-rows auto",
        f"{FUSED} --commfuse-min-rows auto --commfuse-chunks 2",
        FUSED.replace("parallel-size 2", "parallel-size 1"),
        f"{FUSED} --commfuse-layers qkv,fc2",
        f"{FUSED} --commfuse-min-rows 97",
        f"{FUSED} --commfuse-min-rows 96",
        f"{SIZES} --use-commfuse --commfuse-layers fc2 --bf16 --commfuse-min-rows 0",
    ],
)
def test_reasons_and_shapes_are_those_of_the_wrappers(monkeypatch, words: str) -> None:
    made = launch(*words.split())
    linears, called = wrapped(monkeypatch, made)
    for found in fused_layers(made):
        called.clear()
        linears.calls.clear()
        column = found.layer in ("qkv", "fc1", "output")
        wrap = linears.column_forward_wrapper if column else linears.row_forward_wrapper
        wrap(own)(linear(made, found), torch.empty(found.input_shape, dtype=torch.bfloat16))
        assert list(linears.calls) == [(found.layer, found.reason or "fused")]
        expected = [(found.operator, found.input_shape, found.weight_shape)]
        assert called == (expected if found.operator else [])


@pytest.mark.parametrize(
    "change",
    [
        "",
        "--sequence-parallel",
        "--sequence-parallel --recompute-granularity selective",
        "--sequence-parallel --recompute-activations",
        "--sequence-parallel --recompute-granularity full",
        "--sequence-parallel --commfuse-min-rows 100",
    ],
)
def test_attention_waits_where_the_wrappers_let_it(monkeypatch, change: str) -> None:
    fused = "--use-commfuse --bf16 --commfuse-attention --commfuse-min-rows 0"
    made = launch(*f"{SIZES} {fused} {change}".split())
    linears, called = wrapped(monkeypatch, made)
    (found,) = [layer for layer in fused_layers(made) if layer.layer == "proj"]
    rows, batch, features = found.input_shape
    heads = made.config.num_attention_heads // made.config.tensor_model_parallel_size
    q = torch.zeros(rows, batch, heads, features // heads, dtype=torch.bfloat16)

    def attend(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return q.flatten(2)

    # The attention and its projection in one, as Megatron's arguments would have them.
    layer = linear(
        made,
        found,
        core_attention=SimpleNamespace(forward=attend),
        attn_mask_type="causal",
        checkpoint_core_attention="selective" in change or "activations" in change,
        training=True,
    )
    AttentionWrappers(linears).self_attention_init_wrapper(lambda layer: None)(layer)
    attended = layer.core_attention.forward(q, q, q, None)
    linears.row_forward_wrapper(own)(layer, attended)

    assert [operator for operator, *_ in called] == ([found.operator] if found.operator else [])
    together = found.operator == ATTENTION_OPERATOR
    said = attention_obstacle(made.options) or found.reason or "fused"
    assert linears.calls["attention", said] == 1
    assert together == (said == "fused")
