"""Whether a layout lets ``--commfuse-ulysses`` exchange heads."""

from __future__ import annotations

from commfuse_npu.tools.doctor.finding import Finding, about
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["check_ulysses_layout"]

_about = about("launch")


def check_ulysses_layout(config: ModelConfig) -> list[Finding]:
    """What the feature would refuse, and else what is fused."""
    name, size = "--commfuse-ulysses", config.context_parallel_size
    if size == 1:
        return [
            _about(
                name,
                "error",
                "given, with --context-parallel-size 1",
                "at least 2: a context-parallel group of one exchanges no heads",
                f"choose CP of at least 2, or leave {name} out",
            )
        ]
    if config.context_parallel_algo != "ulysses_cp_algo":
        return [
            _about(
                name,
                "error",
                f"given, with --context-parallel-algo {config.context_parallel_algo}",
                "ulysses_cp_algo: others do not exchange heads, or not over the whole group",
                f"choose it, or leave {name} out",
            )
        ]
    # Whether heads and sequence can be shared out is checked with the layout, for every launch.
    return [
        _about(
            name,
            "note",
            f"given, CP {size}",
            action=f"{_what_hides(config)}; calls with packed sequences, a bias or a mask that is "
            "not causal keep their own",
        )
    ]


def _what_hides(config: ModelConfig) -> str:
    """Which of the all-to-alls around attention hide, and why the others do not."""
    if config.tensor_model_parallel_size > 1:
        return (
            "the output's all-to-all hides behind attention, that of q, k and v does not: at TP "
            f"{config.tensor_model_parallel_size} the weights of the projections are not whole"
        )
    if config.num_query_groups % config.context_parallel_size:
        return (
            "the output's all-to-all hides behind attention and its projection, that of q, k and v "
            f"does not: {config.num_query_groups} query groups are not divisible by CP "
            f"{config.context_parallel_size}"
        )
    return "all-to-alls hide behind attention and its projections"
