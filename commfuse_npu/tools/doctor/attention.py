"""When attention runs as one op with the projection of its output (``--commfuse-attention``).

What decides at run time is the wrapper around Megatron's self-attention, call by call; this says
what a command line tells about it beforehand, and tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_npu.tools.doctor.launch import value_of
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["attention_obstacle", "recomputes_attention"]


def recomputes_attention(options: Sequence[str]) -> bool:
    """Whether a command line has the core attention recomputed by itself.

    MindSpeed's attention does so at this granularity whatever ``--recompute-modules`` lists.
    """
    selective = value_of(options, "--recompute-granularity") == "selective"
    return selective or value_of(options, "--recompute-activations") is not None


def attention_obstacle(config: ModelConfig, recomputed: bool) -> str:
    """Why no attention waits for its projection, in the words of the wrappers; empty if it does."""
    if recomputed:
        return "selective recomputation runs the core attention by itself"
    if not config.uses_sequence_parallel:
        return "without sequence parallelism nothing is split"
    return ""
