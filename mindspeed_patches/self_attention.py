"""Self-attention fused with the projection of its output, in Megatron's ``SelfAttention``.

Megatron calls attention and its output projection one after the other, as two modules.  To fuse
them, the core attention of each layer returns a :class:`DeferredAttention`: a tensor that stands
for attention which has not run yet.  The row-parallel projection, whose ``forward``
:class:`LinearWrappers` wraps, recognizes it and runs both in one op.  Any other torch function or
operator that receives the tensor first runs attention and then uses its output.

:mod:`.core_attention` says which core attentions are plain ``softmax(q k^T * scale) v``.  A call of
one is fused if its keys are given in one of two ways:

- by the mask type alone, causal or full;
- under ``--reset-attention-mask``, by the ends of packed documents, which MindSpeed passes as
  ``packed_seq_params.cu_seqlens_q`` (and to its operator as ``actual_seq_qlen``), whatever
  ``--attention-mask-type`` is.

Otherwise, under ``--attention-mask-type general`` or with samples padded on the left, a mask from
the data is used in addition to the causal one; such attention keeps its own forward.  A data mask
under ``--attention-mask-type causal`` hides only the padding after a sample, which no token of the
sample sees anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from commfuse_npu.ops import Documents, LinearOptions
from commfuse_npu.ops.call import AnyTransport
from mindspeed_patches.core_attention import softmax_scale

Arguments = dict[str, Any]
"""Keywords of a call, or of an op with attention."""

_AFTER_THE_MASK = ("attn_mask_type", "attention_bias", "packed_seq_params")


def attention_arguments(
    core: Any, args: Sequence[Any], kwargs: Arguments, length: int, batch: int
) -> Arguments | str:
    """The ops' ``causal``, ``documents`` and ``scale``, or why this attention is more than theirs.

    Args:
        core: the core attention; has the mask type if the call passes none.
        args, kwargs: of its call, from the mask on.
        length: of the full sequence.
        batch: number of sequences.
    """
    scale = softmax_scale(core)
    if isinstance(scale, str):
        return scale
    config = core.config
    arguments = dict(zip(_AFTER_THE_MASK, args[1:], strict=False)) | kwargs
    packed = arguments.pop("packed_seq_params", None)
    kind = arguments.pop("attn_mask_type", None) or core.attn_mask_type
    kind = str(getattr(kind, "name", kind))
    if kind not in ("causal", "no_mask"):
        return f"its mask is {kind}; only causal and no_mask can be split by queries"
    if packed is not None:
        if not getattr(config, "reset_attention_mask", False):
            return "its packed sequences are not those of --reset-attention-mask"
        if kind != "causal":
            return f"its mask is {kind}; documents are packed for causal attention"
    elif kind == "causal" and (
        getattr(config, "attention_mask_type", "causal") == "general"
        or getattr(config, "tokenizer_padding_side", "right") == "left"
    ):
        return (
            "its mask is that of the data (--attention-mask-type general, or samples padded "
            "on the left); only causal and full attention and packed documents are fused"
        )
    for name, value in arguments.items():
        if value is not None:
            return f"its call passes {name}, which the fused attention does not take"
    if getattr(config, "window_size", None) is not None:
        return "a sliding window limits the keys"
    given = {"causal": kind == "causal", "scale": scale}
    if packed is None:
        return given
    documents = _of_documents(packed, length, batch)
    return documents if isinstance(documents, str) else given | {"documents": documents}


def heads_obstacle(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why these queries and keys are not those of the fused ops, or ``None``."""
    if query.dim() == 4 and query.shape[0] == key.shape[0] and key.shape == value.shape:
        return None
    return "queries and keys are not of one sequence (decoding keeps keys of other calls)"


def proj_obstacle(linear: Any) -> str | None:
    """Why attention cannot be deferred to an output projection, or ``None``.

    A :class:`DeferredAttention` that an autograd function gets as it is would lose its gradient.
    """
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    if "forward" in vars(linear) or type(linear).forward is not RowParallelLinear.forward:
        return f"the forward of its {type(linear).__name__} is not Megatron's"
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
        except ValueError:
            documents = "a document continues in the next sample of the micro-batch"
        packed.commfuse_documents = documents
    return documents


_NEEDS_NO_VALUE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "element_size")),
}


class DeferredAttention(torch.Tensor):
    """A tensor ``[S / N, B, N * A * D]``, computed by :meth:`value` on first use.

    ``N`` is 1, or under Ulysses the number of ranks that exchange heads for rows after attention.
    """

    _heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    _arguments: Arguments
    _attend: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def of(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        arguments: Arguments,
        attend: Callable[[], torch.Tensor],
        ranks: int = 1,
    ) -> DeferredAttention:
        """Defer ``attend()``, which returns ``[S / N, B, N * A * D]`` for ``N`` ``ranks``.

        Args:
            q, k, v: ``[S, B, A, D]`` and ``[S, B, G, D]``.
            arguments: of the op that runs attention and projection (:func:`attention_arguments`).
        """
        deferred: DeferredAttention = torch.Tensor._make_wrapper_subclass(
            DeferredAttention,
            (q.shape[0] // ranks, q.shape[1], ranks * q.shape[2] * q.shape[3]),
            dtype=q.dtype,
            device=q.device,
        )
        deferred._heads = q, k, v
        deferred._arguments = arguments
        deferred._attend = attend
        deferred._value = None
        return deferred

    def value(self) -> torch.Tensor:
        """The output of attention, computed by the first call and cached."""
        if self._value is None:
            # Its first use may be without gradients; q, k and v say whether there are any.
            with torch.enable_grad():
                self._value = self._attend()
        return self._value

    def project(
        self, op: Callable[..., Any], linear: Any, options: LinearOptions, transport: AnyTransport
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of the row-parallel layer after it: attention and layer in one op."""
        added, apart = (None, linear.bias) if linear.skip_bias_add else (linear.bias, None)
        arguments = self._arguments | {"bias": added, "options": options, "group": transport}
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
