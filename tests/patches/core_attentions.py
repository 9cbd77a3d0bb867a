"""Core attentions as MindSpeed-LLM has them, without its packages."""

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from commfuse_npu.kernels.cpu import attention_forward

LLM = "mindspeed_llm.core.transformer.custom_dot_product_attention"


def _attend(
    self: Any, q: Any, k: Any, v: Any, mask: Any, topk_indices: Any = None, **_: Any
) -> torch.Tensor:
    out, _ = attention_forward(q, k, v, causal=True, scale=self.scale)
    return out.flatten(2)


def forward_of(module: str) -> Callable[..., torch.Tensor]:
    """A forward that multiplies the scores by ``scale``, as if defined in a module."""
    names = {"__name__": module, "attention_forward": attention_forward}
    return types.FunctionType(_attend.__code__, names, "forward", _attend.__defaults__)


class Core(torch.nn.Module):
    """A core attention with the attributes that are read."""

    forward = forward_of(LLM)

    def __init__(self, kind: str = "causal", dropout: float = 0.0, **config: Any) -> None:
        super().__init__()
        self.config, self.attn_mask_type = SimpleNamespace(**config), kind
        self.attention_dropout, self.scale = torch.nn.Dropout(dropout), 0.25
