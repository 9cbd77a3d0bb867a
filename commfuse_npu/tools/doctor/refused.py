"""With which options CommFuse refuses to start: what ``mindspeed_patches.refusals`` says.

The doctor does not import that package; tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_npu.tools.doctor.launch import value_of

__all__ = [
    "ATTENTION_REFUSED",
    "DATA_PARALLEL_REFUSED",
    "FLOW_REFUSED",
    "REFUSED",
    "ULYSSES_REFUSED",
    "refused_value",
]

REFUSED = (
    "--use-ascend-mc2",
    "--use-ascend-coc",
    "--unaligned-linear",
    "--tp-2d",
    "--moe-fb-overlap",
    "--use-nanopipe",
    "--schedules-method",
    "--qat-scheme",
    "--fp8-format",
    "--lora-target-modules",
    "--tp-comm-overlap",
    "--output-layer-slice-num",
    "--use-legacy-models",
)
"""Options that exclude ``--use-commfuse``."""

ATTENTION_REFUSED = (
    "--attention-dropout",
    "--multi-latent-attention",
    "--context-parallel-size",
    "--position-embedding-type",
    "--sliding-window",
    "--interleave-sliding-window",
    "--pre-tockens",
    "--next-tockens",
    "--sparse-mode",
    "--query-pre-attn-scalar",
    "--attn-logit-softcapping",
)
"""Options that exclude ``--commfuse-attention``."""

ULYSSES_REFUSED = (
    *(option for option in ATTENTION_REFUSED if option != "--context-parallel-size"),
    "--context-parallel-kv-cache-policy",
    "--use-ulysses-allgather-kv",
)
"""Options that exclude ``--commfuse-ulysses``."""

FLOW_REFUSED = (
    *ATTENTION_REFUSED,
    "--commfuse-attention",
    "--reset-attention-mask",
    "--shape-order",
    "--hidden-dropout",
    "--attention-mask-type",
    "--transformer-impl",
    "--num-experts",
    "--mtp-num-layers",
    "--enable-mhc",
    "--scale-depth",
    "--share-kvstates",
    "--is-instruction-dataset",
    "--recompute-activation-function",
    "--recompute-norm",
    "--recompute-in-advance",
    "--recompute-in-bubble",
    "--adaptive-memory-optimization",
    "--swap-attention",
    "--enable-cuda-graph",
)
"""Options that exclude ``--commfuse-flow``."""

DATA_PARALLEL_REFUSED = (
    "--num-distributed-optimizer-instances",
    "--use-custom-fsdp",
    "--use-torch-fsdp2",
    "--layerzero",
    "--quant-grads",
    "--enable-high-availability",
    "--ttp-enabled",
    "--optimizer",
    "--layerwise-disaggregated-training",
)
"""Options that exclude ``--commfuse-dp``."""

_ONLY_WITH = {
    "--attention-mask-type": ("general",),
    "--schedules-method": ("dualpipev",),
    "--position-embedding-type": ("alibi",),
    "--shape-order": ("TND",),
    "--optimizer": ("muon", "dist_muon"),
    "--transformer-impl": ("transformer_engine",),
}
_NOT_WITH = {
    "--pre-tockens": ("65536", "1048576"),
    "--next-tockens": ("0",),
    "--sparse-mode": ("0", "2"),
}
_ONLY_ABOVE = {
    "--output-layer-slice-num": 1,
    "--context-parallel-size": 1,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--num-experts": 1,
    "--num-distributed-optimizer-instances": 1,
}
# What excludes without being typed.
_DEFAULTS = {
    "--attention-dropout": "0.1",
    "--hidden-dropout": "0.1",
    "--transformer-impl": "transformer_engine",
}


def refused_value(options: Sequence[str], option: str) -> str | None:
    """The value with which a command line has an option refused; ``None`` if it is harmless."""
    value = value_of(options, option)
    if value is None:
        default = _DEFAULTS.get(option)
        return None if default is None else f"{default}, Megatron's default"
    if option in _ONLY_WITH and value not in _ONLY_WITH[option]:
        return None
    if value in _NOT_WITH.get(option, ()):
        return None
    if option in _ONLY_ABOVE and _number(value) <= _ONLY_ABOVE[option]:
        return None
    return value or "given"


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return float("inf")  # Whatever it is, it is not known to be harmless.
