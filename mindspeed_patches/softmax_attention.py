"""Whether a call of a core attention is ``softmax(q k^T) v``, causal or full, and nothing more.

Megatron hands the same things to every class of core attention; what the fused forms need to know
of them is the same, too.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["call_arguments", "call_obstacle", "mask_type", "softmax_obstacle"]

_AFTER_THE_MASK = ("attn_mask_type", "attention_bias", "packed_seq_params")


def call_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a core attention is given after query, key, value and mask, by name."""
    return dict(zip(_AFTER_THE_MASK, args, strict=False)) | kwargs


def mask_type(layer: Any, given: dict[str, Any]) -> str:
    """The name of Megatron's ``AttnMaskType``: of this call, or else of the layer."""
    kind = given.get("attn_mask_type") or layer.attn_mask_type
    return str(getattr(kind, "name", kind))


def softmax_obstacle(
    config: Any,
    training: bool,
    query: Any,
    key: Any,
    value: Any,
    mask: str,
    given: dict[str, Any],
) -> str | None:
    """Why this attention is more than a softmax over scores, or ``None``.

    Args:
        config: Megatron's configuration of the layer.
        training: whether dropout counts.
        query, key, value: as Megatron passes them.
        mask: from :func:`mask_type`.
        given: from :func:`call_arguments`.
    """
    reason = call_obstacle(config, training, mask, given)
    if reason is not None:
        return reason
    if not all(isinstance(tensor, torch.Tensor) for tensor in (query, key, value)):
        return "queries and keys come in parts"
    if query.dim() != 4 or query.shape[0] != key.shape[0] or key.shape != value.shape:
        return f"queries {tuple(query.shape)} and keys {tuple(key.shape)} are not of one sequence"
    return None


def call_obstacle(config: Any, training: bool, mask: str, given: dict[str, Any]) -> str | None:
    """What :func:`softmax_obstacle` can say before there are queries and keys."""
    if mask not in ("causal", "no_mask"):
        return f"its mask is {mask}; only causal and no_mask can be split by queries"
    if given.get("packed_seq_params") is not None:
        return "packed sequences have boundaries that a split of the queries does not respect"
    if given.get("attention_bias") is not None:
        return "an attention bias is added to the scores"
    if config.attention_dropout and training:
        return f"attention dropout is {config.attention_dropout}"
    if getattr(config, "window_size", None) is not None:
        return "a sliding window limits the keys"
    return None
