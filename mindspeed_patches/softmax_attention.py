"""Whether a call of a core attention is ``softmax(q k^T) v`` and nothing more, and its mask.

Megatron hands the same things to every class of core attention; what the fused forms need to know
of them is the same, too.  What a query sees is said in three ways:

- by the mask's type alone, causal or full;
- under ``--reset-attention-mask`` by the ends of packed documents, which MindSpeed hands on as
  ``packed_seq_params.cu_seqlens_q`` (and to its operator as ``actual_seq_qlen``), whatever
  ``--attention-mask-type`` is;
- else under ``--attention-mask-type general``, or with samples padded on the left, by a mask that
  the data bring, in addition to the causal one: ``sparse_mode`` 0 with ``next_tockens`` 0.

A mask of the data beside ``--attention-mask-type causal`` hides the padding behind a sample, which
no token of it sees anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from commfuse_npu.ops import Documents
from commfuse_npu.ops.attention_mask import AttentionMask

__all__ = ["call_arguments", "call_obstacle", "mask_of_call", "mask_type", "softmax_obstacle"]

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
        if not getattr(config, "reset_attention_mask", False):
            return "its packed sequences are not those of --reset-attention-mask"
        if mask != "causal":
            return f"its mask is {mask}; documents are packed for causal attention"
    if given.get("attention_bias") is not None:
        return "an attention bias is added to the scores"
    if config.attention_dropout and training:
        return f"attention dropout is {config.attention_dropout}"
    if getattr(config, "window_size", None) is not None:
        return "a sliding window limits the keys"
    return None


def mask_of_call(
    config: Any,
    mask: str,
    given: dict[str, Any],
    of_data: torch.Tensor | None,
    length: int,
    batch: int,
) -> AttentionMask | str:
    """Which keys a query sees, or why the fused form cannot tell.

    Args:
        config, mask, given: as for :func:`softmax_obstacle`, which has found nothing.
        of_data: the attention mask that Megatron passes, if any.
        length: of the whole sequence, S.
        batch: how many samples there are, B.
    """
    packed = given.get("packed_seq_params")
    if packed is not None:
        return _of_documents(packed, length, batch)
    by_data = (
        getattr(config, "attention_mask_type", "causal") == "general"
        or getattr(config, "tokenizer_padding_side", "right") == "left"
    )
    if mask != "causal" or not by_data:
        return AttentionMask(mask == "causal")
    if of_data is None:
        return "the mask of the data is not passed to it"
    hidden = of_data.view(1, 1, *of_data.shape) if of_data.dim() == 2 else of_data
    shapes = [(samples, 1, length, length) for samples in (batch, 1)]
    if hidden.dtype != torch.bool or hidden.shape not in shapes:
        found = f"{of_data.dtype} {tuple(of_data.shape)}"
        return f"the mask of the data is {found}, not torch.bool {shapes[0]}"
    return AttentionMask(True, hidden=hidden)


def _of_documents(packed: Any, length: int, batch: int) -> AttentionMask | str:
    """All layers of a micro-batch, and their recomputation, get the same object: it keeps them."""
    known: AttentionMask | str | None = getattr(packed, "commfuse_documents", None)
    if known is None:
        ends = packed.cu_seqlens_q
        if ends.dim() != 1:
            return "multi-token prediction has ends of documents for each depth"
        try:
            known = AttentionMask(True, Documents(ends.tolist(), length, batch))
        except ValueError as error:
            known = str(error)
        packed.commfuse_documents = known
    return known
