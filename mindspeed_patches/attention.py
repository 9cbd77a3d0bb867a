"""Self-attention fused with the projection of its output, in Megatron's ``SelfAttention``.

Megatron calls attention and its output projection one after the other, as two modules.  To fuse
them, the core attention of each layer returns a :class:`DeferredAttention`: a tensor that stands
for attention which has not run yet.  The row-parallel projection, whose ``forward``
:class:`LinearWrappers` wraps, recognizes it and runs both in one op.  Any other torch function or
operator that receives the tensor first runs attention and then uses its output.

The class of the core attention does not matter, as long as it computes ``softmax(q k^T) v`` over
keys that :mod:`.softmax_attention` can determine.  Attention that computes more than that keeps its
own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from commfuse_npu.ops import LinearOptions
from commfuse_npu.ops.call import AnyTransport
from mindspeed_patches.patching import around
from mindspeed_patches.softmax_attention import RECOMPUTED, AttentionCall, heads_obstacle

if TYPE_CHECKING:
    from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["AttentionWrappers", "DeferredAttention"]

_NEEDS_NO_VALUE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "element_size")),
}


class DeferredAttention(torch.Tensor):
    """A tensor ``[S / N, B, N * A * D]``, computed by :meth:`value` on first use.

    ``N`` is 1, or under Ulysses the number of ranks that exchange heads for rows after attention.
    """

    _heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    _given: dict[str, Any]
    _attend: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def of(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: dict[str, Any],
        scale: float | None,
        attend: Callable[[], torch.Tensor],
        ranks: int = 1,
    ) -> DeferredAttention:
        """Defer ``attend()``, which returns ``[S / N, B, N * A * D]`` for ``N`` ``ranks``.

        Args:
            q, k, v: ``[S, B, A, D]`` and ``[S, B, G, D]``.
            mask: the op's arguments that say which keys a query sees.
            scale: factor of the scores; ``None`` for ``D ** -0.5``.
        """
        deferred: DeferredAttention = torch.Tensor._make_wrapper_subclass(
            DeferredAttention,
            (q.shape[0] // ranks, q.shape[1], ranks * q.shape[2] * q.shape[3]),
            dtype=q.dtype,
            device=q.device,
        )
        deferred._heads, deferred._given = (q, k, v), mask | {"scale": scale}
        deferred._attend, deferred._value = attend, None
        return deferred

    def value(self) -> torch.Tensor:
        """The output of attention, computed by the first call and cached."""
        if self._value is None:
            self._value = self._attend()
        return self._value

    def project(
        self, op: Callable[..., Any], linear: Any, options: LinearOptions, transport: AnyTransport
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run attention and the row-parallel layer after it in one op.

        Returns:
            The output of the layer: the product, and the bias if the caller adds it.
        """
        added, apart = (None, linear.bias) if linear.skip_bias_add else (linear.bias, None)
        arguments = self._given | {"bias": added, "options": options, "transport": transport}
        return op(*self._heads, linear.weight, **arguments), apart

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NEEDS_NO_VALUE:
            return cls.__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*args, **kwargs)


class AttentionWrappers:
    """Wraps the constructor of self-attention layers, so that attention can be deferred.

    Args:
        linears: the wrapped linear layers, which must include ``proj``.
    """

    def __init__(self, linears: LinearWrappers) -> None:
        self._linears = linears

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        manager.register_patch(
            "megatron.core.transformer.attention.SelfAttention.__init__",
            self.self_attention_init_wrapper,
        )

    @around
    def self_attention_init_wrapper(
        self, init: Callable[..., None], layer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Replace the forward of the new layer's core attention by one that defers attention."""
        init(layer, *args, **kwargs)
        attend = layer.core_attention.forward

        @functools.wraps(attend)
        def forward(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            attention = functools.partial(attend, query, key, value, *args, **kwargs)
            call = AttentionCall.of(layer, layer.training, args, kwargs)
            recomputed = layer.checkpoint_core_attention and layer.training
            reason = RECOMPUTED if recomputed else heads_obstacle(query, key, value)
            mask = reason or call.mask(*query.shape[:2])
            if isinstance(mask, str):
                self._linears.fall_back("attention", mask)
                return attention()
            scale = getattr(layer.config, "softmax_scale", None)
            return DeferredAttention.of(query, key, value, mask=mask, scale=scale, attend=attention)

        layer.core_attention.forward = forward
