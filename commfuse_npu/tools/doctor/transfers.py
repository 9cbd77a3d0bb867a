"""What the transfers of a launch cost: memory for lanes, rounds in HCCL's buffer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.layers import FusedLayer
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.launch_script.options import value_of

__all__ = ["check_transfers"]

_about = partial(Finding, "launch")


def check_transfers(
    machine: Machine, launch: Launch, schedule: Schedule, layers: Sequence[FusedLayer]
) -> Iterator[Finding]:
    """What the lanes cost in memory, and whether a transfer fits HCCL's buffer at once."""
    if launch.config.tensor_model_parallel_size == 1:
        return
    largest = max(layer.longest for layer in layers)
    group_buffer = value_of(launch.options, "--hccl-group-buffer") or ""
    own = re.search(r"(?:^|[;,])\s*commfuse:(\d+)", group_buffer)
    general = launch.variables.get("HCCL_BUFFSIZE", machine.variables.get("HCCL_BUFFSIZE", "200"))
    needed, lanes = (
        -(-largest // 2**20),
        schedule.lanes_for(launch.config.tensor_model_parallel_size),
    )
    if own:
        megabytes = int(own[1])
    elif group_buffer:
        megabytes = int(general) if general.isdecimal() else 200
    else:  # the feature sizes them to their messages
        megabytes = min(200, max(16, 1 << max(0, needed - 1).bit_length()))
    yield _about(
        "memory for lanes",
        "note",
        f"{2 * lanes * megabytes} MB per NPU: {lanes} lanes with 2 x {megabytes} MB",
        action=f"--hccl-group-buffer commfuse:{needed} takes {2 * lanes * needed} MB "
        "and still holds the largest transfer"
        if largest
        else "nothing uses them: leave --use-commfuse out",
    )
    if launch.fuse.tuning == "on":
        yield _about(
            "tuning",
            "note",
            f"up to 8 chunks and {lanes} lanes are tried at the first use of a shape",
            action="the figures above are those of whole blocks; --commfuse-tuning off and the "
            "options that it logged give the same schedule in every run",
        )
    if needed > megabytes:
        yield _about(
            "largest transfer",
            "warning",
            f"{largest / 2**20:.1f} MB",
            f"at most HCCL's buffer of {megabytes} MB: larger ones go in several rounds",
            f"--hccl-group-buffer commfuse:{needed}",
        )
