"""Whether a launch lets ``--commfuse-dp`` exchange gradients and parameters."""

from __future__ import annotations

from commfuse_npu.tools.doctor.finding import Finding, about
from commfuse_npu.tools.doctor.launch import Launch, value_of

__all__ = ["check_data_parallel"]

_about = about("launch")


def check_data_parallel(launch: Launch) -> list[Finding]:
    """What the feature would refuse, and else what is exchanged."""
    name, config = "--commfuse-dp", launch.config
    if value_of(launch.options, "--use-distributed-optimizer") is None:
        return [
            _about(
                name,
                "error",
                "given, without --use-distributed-optimizer",
                "the flag: without it gradients are all-reduced and parameters never gathered",
                f"add --use-distributed-optimizer, or leave {name} out",
            )
        ]
    if launch.fuse.schedule == "ring":
        return [
            _about(
                name,
                "error",
                "given, with --commfuse-schedule ring",
                "another schedule: on a ring a bucket waits for ranks in between",
                f"choose auto, shifted or two_level, or leave {name} out",
            )
        ]
    replicas = config.data_parallel_size * config.context_parallel_size
    if replicas == 1:
        return [
            _about(
                name,
                "warning",
                "given, with DP 1",
                "at least 2: a data-parallel group of one transfers nothing",
                f"leave {name} out, or choose a smaller TP or PP",
            )
        ]
    return [
        _about(
            name,
            "note",
            f"given, {replicas} ranks share a copy of the optimizer's state",
            action="parameters of experts keep Megatron's collectives",
        )
    ]
