"""Names of linear layers on the command line, in counts and in reports.

Most layers are identified by the communication buffer name that their constructor gets, which is
the name on the command line or in :data:`_OF_BUFFERS` (``--mla-mm-split`` has several buffers for
one name).  Layers without such a name, or with the same one as another kind, are named by their
parent module (:data:`_INSIDE`).

(Read in Megatron-LM core_v0.12.1, MindSpeed and MindSpeed-LLM 26.1.0.)  The down-projections of
MindSpeed-LLM's latent attention have full weights and transfer nothing; Megatron's own are
column-parallel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed_patches.patching import around

_OF_BUFFERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("qb", "qk_nope", "qk_rope"), "q_up"),
    **dict.fromkeys(("kvb", "kv_nope", "v"), "kv_up"),
}

_TRANSFORMER = "megatron.core.transformer"
_INSIDE = {
    f"{_TRANSFORMER}.moe.shared_experts.SharedExpertMLP": {
        "linear_fc1": "shared_fc1",
        "linear_fc2": "shared_fc2",
    },
    f"{_TRANSFORMER}.multi_latent_attention.MLASelfAttention": {
        "linear_q_proj": "q_up",
        **{f"linear_{n}_proj": n for n in ("q_down", "q_up", "kv_down", "kv_up")},
    },
    f"{_TRANSFORMER}.multi_token_prediction.MultiTokenPredictionLayer": {"eh_proj": "eh_proj"},
}

Init = Callable[..., None]


def layer_name(layer: Any) -> str:
    """One of :data:`LAYERS`, ``experts``, another buffer's name, or ``unnamed``.

    A layer that was created before the patches were applied is ``unnamed``, too.
    """
    if getattr(layer, "is_expert", False):
        return "experts"
    return getattr(layer, "commfuse_layer", "unnamed")


def named_init_wrapper(init: Init) -> Init:
    """Store the name of the layer, taken from its communication buffer, on the layer."""

    @functools.wraps(init)
    def init_and_name(layer: Any, *args: Any, **kwargs: Any) -> None:
        init(layer, *args, **kwargs)
        # Only the output layer has this argument (a weight shared with the embedding).
        unnamed = "output" if "skip_weight_param_allocation" in kwargs else "unnamed"
        buffer = kwargs.get("tp_comm_buffer_name") or unnamed
        layer.commfuse_layer = _OF_BUFFERS.get(buffer, buffer)

    return init_and_name


def register_names(manager: Any) -> None:
    """Register the wrappers that name layers by their parent module.

    With MindSpeed's patch manager, or with our stand-in.
    """
    for module, names in _INSIDE.items():
        manager.register_patch(f"{module}.__init__", _Named(names).naming_init_wrapper)


class _Named(dict[str, str]):
    """Names of the layers in a parent module, by attribute."""

    @around
    def naming_init_wrapper(self, init: Init, module: Any, *args: Any, **kwargs: Any) -> None:
        init(module, *args, **kwargs)
        for attribute, name in self.items():
            if (layer := getattr(module, attribute, None)) is not None:
                layer.commfuse_layer = name
