"""A tensor that stands for attention which has not run yet.

Attention and the projection of its output are two modules in Megatron, called one after the other.
To fuse them, the first returns this stand-in, and the second, which knows it, runs both.  Whoever
else touches it gets what attention would have returned: any torch function, any operator, runs
attention first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from commfuse_npu.ops.attention_mask import AttentionMask

__all__ = ["DeferredAttention"]

_NEEDS_NO_VALUE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "element_size")),
}


class DeferredAttention(torch.Tensor):
    """``[S / N, B, N * A * D]`` that :meth:`value` computes when it is asked for.

    ``N`` is 1, or under Ulysses as many ranks as exchange heads for rows after attention.

    Attributes:
        q, k, v: ``[S, B, A, D]`` and ``[S, B, G, D]``.
        mask: which keys a query sees.
        scale: of the scores; ``None`` for ``D ** -0.5``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: AttentionMask
    scale: float | None
    _attend: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def of(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: AttentionMask,
        scale: float | None,
        attend: Callable[[], torch.Tensor],
        ranks: int = 1,
    ) -> DeferredAttention:
        """Defer ``attend()``, which returns ``[S / N, B, N * A * D]`` for ``N`` ``ranks``."""
        deferred: DeferredAttention = torch.Tensor._make_wrapper_subclass(
            DeferredAttention,
            (q.shape[0] // ranks, q.shape[1], ranks * q.shape[2] * q.shape[3]),
            dtype=q.dtype,
            device=q.device,
        )
        deferred.q, deferred.k, deferred.v = q, k, v
        deferred.mask, deferred.scale = mask, scale
        deferred._attend, deferred._value = attend, None
        return deferred

    def value(self) -> torch.Tensor:
        """What attention returns; it runs once."""
        if self._value is None:
            self._value = self._attend()
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NEEDS_NO_VALUE:
            args, kwargs = tree_map(_value, (args, kwargs or {}))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredAttention(shape={tuple(self.shape)}, causal={self.mask.causal})"


def _value(x: Any) -> Any:
    return x.value() if isinstance(x, DeferredAttention) else x
