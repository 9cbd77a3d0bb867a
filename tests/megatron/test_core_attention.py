"""Which core attentions are a softmax that the fused ops equal, and with which scale."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.kernels.cpu import attention_forward
from mindspeed_patches.core_attention import softmax_scale
from tests.distributed.ranks import on_ranks
from tests.megatron.models import Case, gpt, settings
from tests.megatron.training import launched, layout
from tests.patches.core_attentions import LLM, forward_of

SCALED = {"apply_query_key_layer_scaling": True, "softmax_scale": 0.2}
LAYERS = {"num_layers": 4}
CASE = Case(tensor=2, launch="--commfuse-attention", options=LAYERS)


def core_class() -> Any:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return DotProductAttention


def last_attention(case: Case) -> Any:
    """The self-attention of layer 4."""
    model: Any = gpt(case, settings(case))
    return model.decoder.layers[3].self_attention


@on_ranks(1)
def test_scale_is_that_of_megatrons_attention(rank: int) -> None:
    q, k, v = (torch.randn(6, 1, 4, 8) for _ in range(3))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1).view(1, 1, 6, 6)
    for options in ({}, {"softmax_scale": 0.2}, SCALED):
        case = Case(options=LAYERS | options)
        with layout(case):
            core = last_attention(case).core_attention
            expected = core(q, k, v, hidden)
        found, _ = attention_forward(q, k, v, causal=True, scale=softmax_scale(core))
        torch.testing.assert_close(found.flatten(2), expected)


@on_ranks(1)
def test_unknown_state_and_code_are_refused_by_name(rank: int) -> None:
    class Windowed(core_class()):
        def forward(self, *args: Any) -> None: ...

    case = Case(options=LAYERS)
    offset = torch.nn.Parameter(torch.zeros(4))
    changes: list[tuple[str, Callable[[Any], object]]] = [
        ("has pse", lambda core: setattr(core, "pse", torch.ones(1))),
        ("has attn_logit_softcap", lambda core: setattr(core, "attn_logit_softcapping", 30.0)),
        ("has sinks_offset", lambda core: core.register_buffer("sinks_offset", offset.data)),
        ("has sinks_offset", lambda core: core.register_parameter("sinks_offset", offset)),
        ("has indexer", lambda core: core.add_module("indexer", torch.nn.Linear(1, 1))),
        ("attention dropout is 0.1", lambda core: setattr(core.attention_dropout, "p", 0.1)),
        (f"runs code of {__name__}", lambda core: setattr(core, "__class__", Windowed)),
        ("runs code of builtin_function", lambda core: setattr(core, "forward", print)),
    ]
    with layout(case):
        for words, change in changes:
            core = last_attention(case).core_attention
            core.pse, core.square_alibi_mask, core.sinks = None, False, 0
            assert softmax_scale(core) == core.softmax_scale
            change(core)
            assert words in str(softmax_scale(core))


def attended(rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    with torch.no_grad():
        output, _ = last_attention(CASE)(torch.randn(4, 2, 32), None)
    return output


@on_ranks(2)
def test_fused_attention_has_the_layers_own_scale(rank: int) -> None:
    """MindSpeed-LLM divides the scale by the layer's number and never multiplies by it again."""
    for module, path in (
        (LLM, "fused"),
        ("my_program", "its core attention runs code of my_program, which may be more than a sof"),
    ):
        own = mock.patch.multiple(core_class(), forward=forward_of(module), scale=0.1, create=True)
        with layout(CASE), own:
            expected = attended(rank)
            with launched(CASE) as (linears, _):
                found = attended(rank)
        torch.testing.assert_close(found, expected)
        paths = {path for name, path in linears.calls if name == "attention"}
        assert len(paths) == 1
        assert paths.pop().startswith(path)
