"""Whether a call of core attention is plain ``softmax(q k^T) v``, and which mask it uses.

Megatron passes the same arguments to every class of core attention, and the fused ops need the same
facts about each.  The keys that a query sees are given in one of two ways:

- by the mask type alone, causal or full;
- under ``--reset-attention-mask``, by the ends of packed documents, which MindSpeed passes as
  ``packed_seq_params.cu_seqlens_q`` (and to its operator as ``actual_seq_qlen``), whatever
  ``--attention-mask-type`` is.

Otherwise, under ``--attention-mask-type general`` or with samples padded on the left, a mask from
the data is used in addition to the causal one; such attention is not fused.  A data mask under
``--attention-mask-type causal`` hides only the padding after a sample, which no token of the sample
sees anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from commfuse_npu.ops import Documents

__all__ = ["RECOMPUTED", "AttentionCall", "heads_obstacle", "masked_by_data"]

RECOMPUTED = "selective recomputation runs core attention separately"
"""Why attention of such a layer cannot be deferred to its projection."""


def masked_by_data(config: Any) -> str | None:
    """Why attention is not fused if a mask from the data hides keys of causal attention.

    Args:
        config: Megatron's configuration of a layer without packed documents.
    """
    if (
        getattr(config, "attention_mask_type", "causal") != "general"
        and getattr(config, "tokenizer_padding_side", "right") != "left"
    ):
        return None
    return (
        "its mask is that of the data (--attention-mask-type general, or samples padded on the "
        "left); only causal and full attention and packed documents are fused"
    )


_AFTER_THE_MASK = ("attn_mask_type", "attention_bias", "packed_seq_params")


class AttentionCall(NamedTuple):
    """The arguments of one call of core attention that decide whether it can be fused.

    Attributes:
        config: Megatron's configuration of the layer.
        training: whether dropout is active.
        kind: the name of Megatron's ``AttnMaskType``.
        arguments: those after the mask, by name.
        of_data: the attention mask that Megatron passes, or ``None``.
    """

    config: Any
    training: bool
    kind: str
    arguments: dict[str, Any]
    of_data: torch.Tensor | None

    @classmethod
    def of(
        cls,
        owner: Any,
        training: bool,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> AttentionCall:
        """Read a call of core attention, or of the layer around it.

        Args:
            owner: has the configuration, and the mask type if the call does not pass one.
            args, kwargs: of the call, starting with the mask.
        """
        arguments = dict(zip(_AFTER_THE_MASK, args[1:], strict=False)) | (kwargs or {})
        of_data = args[0] if args else arguments.get("attention_mask")
        kind = arguments.get("attn_mask_type") or owner.attn_mask_type
        return cls(owner.config, training, str(getattr(kind, "name", kind)), arguments, of_data)

    def mask(self, length: int, batch: int) -> dict[str, Any] | str:
        """The ops' ``causal`` and ``documents``, or why this attention is more than a softmax.

        Args:
            length: of the full sequence, S.
            batch: number of samples, B.
        """
        config, kind, packed = self.config, self.kind, self.arguments.get("packed_seq_params")
        if kind not in ("causal", "no_mask"):
            return f"its mask is {kind}; only causal and no_mask can be split by queries"
        if packed is not None:
            if not getattr(config, "reset_attention_mask", False):
                return "its packed sequences are not those of --reset-attention-mask"
            if kind != "causal":
                return f"its mask is {kind}; documents are packed for causal attention"
        elif kind == "causal" and (reason := masked_by_data(config)):
            return reason
        if self.arguments.get("attention_bias") is not None:
            return "an attention bias is added to the scores"
        if config.attention_dropout and self.training:
            return f"attention dropout is {config.attention_dropout}"
        if getattr(config, "window_size", None) is not None:
            return "a sliding window limits the keys"
        if packed is None:
            return {"causal": kind == "causal"}
        documents = _of_documents(packed, length, batch)
        if isinstance(documents, str):
            return documents
        return {"causal": True, "documents": documents}


def heads_obstacle(query: Any, key: Any, value: Any) -> str | None:
    """Why these queries and keys are not those of the fused ops, or ``None``."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in (query, key, value)):
        return "queries or keys are not one tensor"
    if query.dim() != 4 or query.shape[0] != key.shape[0] or key.shape != value.shape:
        shapes = f"queries {tuple(query.shape)} and keys {tuple(key.shape)}"
        return f"{shapes} are not of one sequence"
    return None


def _of_documents(packed: Any, length: int, batch: int) -> Documents | str:
    """The packed documents, cached on ``packed``, which a micro-batch's layers share."""
    documents: Documents | str | None = getattr(packed, "commfuse_documents", None)
    if documents is None:
        ends = packed.cu_seqlens_q
        if ends.dim() != 1:
            return "multi-token prediction has ends of documents for each depth"
        try:
            documents = Documents(ends.tolist(), length, batch)
        except ValueError as error:
            documents = str(error)
        packed.commfuse_documents = documents
    return documents
