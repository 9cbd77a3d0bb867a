"""The softmax of a core attention, read from the module that the fused ops replace.

The ops compute ``softmax(q k^T * scale) v``, in fp32 and rounded once.  Megatron, MindSpeed and
MindSpeed-LLM have several core attentions, some by patching another, and each version may do more.
Therefore what is known is listed here, and everything else keeps its own forward:

- **Code**: the forward and every function around it are of a module in :data:`_SCALES` or
  :data:`_AROUND`.  A subclass without a forward of its own is known, too.
- **State**: every attribute, parameter, buffer or submodule is in :data:`_NEUTRAL`, or off
  (``None``, ``False`` or 0).  So a bias of alibi (``pse``), attention sinks (``softmax_offset``)
  or a cap of the scores are refused by their names, and so is what a later version adds.

Where the factor of the scores is (read in Megatron core 0.12.1, 0.13.0 and 0.16.1, MindSpeed 2.3.0
and 26.1.0, MindSpeed-LLM 2.2.0 to 26.1.0 and master)::

    Megatron       softmax_scale, times scale_mask_softmax.scale: --apply-query-key-layer-scaling
                   divides the first by the number of the layer and multiplies by it again
    MindSpeed      softmax_scale alone, on core_attention inside if that is its own module
    MindSpeed-LLM  scale

``--attention-softmax-in-fp32`` and ``--no-masked-softmax-fusion`` choose how Megatron rounds.
Options that MindSpeed's forwards read from the launch are refused in
:mod:`commfuse_npu.launch.refusals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any


def _megatrons_scale(core: Any) -> float:
    multiplier: float | None = core.scale_mask_softmax.scale
    scale: float = core.softmax_scale
    return scale if multiplier is None else scale * multiplier


_SCALES: dict[str, Callable[[Any], float]] = {
    "megatron.core.transformer.dot_product_attention": _megatrons_scale,
    **dict.fromkeys(
        (
            "mindspeed.core.context_parallel.dot_product_attention",
            "mindspeed.core.transformer.flash_attention.flash_attention.adaptor",
        ),
        attrgetter("softmax_scale"),
    ),
    "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention": attrgetter(
        "core_attention.softmax_scale"
    ),
    **dict.fromkeys(
        (
            "mindspeed_llm.core.context_parallel.dot_product_attention",
            "mindspeed_llm.core.transformer.custom_dot_product_attention",
        ),
        attrgetter("scale"),
    ),
}
"""The factor of the scores, by the module of the forward."""

_AROUND = (
    "mindspeed.core.transformer.flash_attention.generate_mask.adaptor",  # makes the causal mask
    "mindspeed_patches.wrappers",
)
"""Modules of functions that call the forward as it is."""

_NEUTRAL = {
    *("config", "training", "forward", "layer_number", "attention_type", "deterministic"),
    *("attn_mask_type", "attention_mask", "sparse_mode", "pse_type", "mtp_idx", "qkv_format"),
    *("softmax_scale", "scale", "norm_factor", "beta", "apply_query_key_layer_scaling"),
    *("scale_mask_softmax", "attention_dropout", "core_attention", "kept_packed_seq_params"),
    *("pg_collection", "ulysses_comm_para"),
}
_SIZES_AND_GROUPS = ("_", "hidden_size_per_", "num_", "tp_", "cp_")
"""State that changes no result beside the factor, and the arguments that this package reads."""


def softmax_scale(core: Any) -> float | str:
    """The factor of the scores, or why a core attention is more than a softmax, or unknown."""
    code = list(_modules_of(core.forward))
    unknown = [name for name in code if name not in _SCALES and name not in _AROUND]
    if unknown:
        return f"its core attention runs code of {unknown[0]}, which may be more than a softmax"
    state = {**vars(core), **core._parameters, **core._buffers, **core._modules}
    for name, value in state.items():
        off = value is None or (isinstance(value, int | float) and not value)
        if not off and name not in _NEUTRAL and not name.startswith(_SIZES_AND_GROUPS):
            return f"its core attention has {name}, which may be more than a softmax"
    # A dropout layer, or its probability.  MindSpeed's operator drops in evaluation, too.
    dropout = getattr(core.attention_dropout, "p", core.attention_dropout)
    if dropout:
        return f"attention dropout is {dropout}"
    return next(_SCALES[name](core) for name in code if name in _SCALES)


def _modules_of(forward: Any) -> Iterator[str]:
    """The modules that define a forward and what it wraps, outermost first.

    ``__module__`` of a wrapper is that of the function it wraps, which it need not call.
    """
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        yield getattr(function, "__globals__", {}).get("__name__", type(function).__name__)
        forward = getattr(function, "__wrapped__", None)
