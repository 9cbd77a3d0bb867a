"""Self-attention fused with the projection of its output, in Megatron's ``SelfAttention``.

The core attention of each layer is asked to wait (:mod:`.deferred_attention`), and the
row-parallel projection after it, whose ``forward`` :class:`LinearWrappers` wraps, runs both in one
operation.  Which class the core attention has does not matter, as long as what it computes is
``softmax(q k^T) v`` over keys that :mod:`.softmax_attention` can tell; whatever is more than that
keeps its own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from commfuse_npu.ops.attention_mask import AttentionMask
from mindspeed_patches.deferred_attention import DeferredAttention
from mindspeed_patches.softmax_attention import (
    call_arguments,
    mask_of_call,
    mask_type,
    softmax_obstacle,
)
from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["AttentionWrappers"]

CoreAttention = Callable[..., torch.Tensor]


class AttentionWrappers:
    """The wrapper of self-attention layers.

    Args:
        linears: the wrapped linear layers, ``proj`` among them.
    """

    def __init__(self, linears: LinearWrappers) -> None:
        self._linears = linears

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        manager.register_patch(
            "megatron.core.transformer.attention.SelfAttention.__init__",
            self.self_attention_init_wrapper,
        )

    def self_attention_init_wrapper(self, init: Callable[..., None]) -> Callable[..., None]:
        """Let the core attention of the new layer wait for the projection."""

        @functools.wraps(init)
        def self_attention_init(layer: Any, *args: Any, **kwargs: Any) -> None:
            init(layer, *args, **kwargs)
            core = layer.core_attention
            core.forward = self._waiting(layer, core.forward)

        return self_attention_init

    def _waiting(self, layer: Any, attend: CoreAttention) -> CoreAttention:
        @functools.wraps(attend)
        def forward(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            def attention() -> torch.Tensor:
                return attend(query, key, value, attention_mask, *args, **kwargs)

            given = call_arguments(args, kwargs)
            kind = mask_type(layer, given)
            seen: AttentionMask | str | None = softmax_obstacle(
                layer.config, layer.training, query, key, value, kind, given
            ) or _cannot_wait(layer)
            if seen is None:
                seen = mask_of_call(layer.config, kind, given, attention_mask, *query.shape[:2])
            if isinstance(seen, str):
                self._linears.leave("attention", seen)
                return attention()
            return DeferredAttention.of(
                query,
                key,
                value,
                mask=seen,
                scale=getattr(layer.config, "softmax_scale", None),
                attend=attention,
            )

        return forward


def _cannot_wait(layer: Any) -> str | None:
    """Why plain attention runs before the projection all the same, or ``None``."""
    if getattr(layer.config, "context_parallel_size", 1) > 1:
        return "context parallelism splits the sequence in its own way"
    if layer.checkpoint_core_attention and layer.training:
        return "selective recomputation runs the core attention by itself"
    return None
