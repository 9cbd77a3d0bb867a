"""What the transfers of a launch cost: memory for lanes, rounds in HCCL's buffer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from commfuse_npu.plan import DATA_PARALLEL_LANES, PlanError
from commfuse_npu.runtime.hccl_options import lane_megabytes
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.fuse_options import schedule_of
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.layers import FusedLayer
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.launch_script.options import value_of

__all__ = ["LanesOf", "check_transfers", "groups_of", "lanes_of"]

_about = partial(Finding, "launch")


class LanesOf(NamedTuple):
    """The lanes of a rank in one kind of group.

    Attributes:
        message: bytes of the longest one; ``None`` where it is not known here.
    """

    kind: str
    lanes: int
    message: float | None


_MOST_LANES = 7
"""By default (:meth:`~commfuse_npu.plan.Schedule.lanes_for`)."""
_DIRECTIONS = 2
"""Gradients and parameters have lanes of their own."""
_BUCKET = 40_000_000
"""Parameters, at least, of a bucket of Megatron's (core 0.12) with ``--overlap-grad-reduce``."""


def lanes_of(launch: Launch) -> list[LanesOf]:
    """Those that a launch makes: of tensor, data and context parallelism."""
    config, fuse = launch.config, launch.fuse
    if not fuse.use_commfuse:
        return []
    found = []
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    block = config.block_rows * config.hidden_size * 2.0
    if tensor > 1:
        with suppress(PlanError):  # which says more elsewhere
            found.append(LanesOf("tensor", schedule_of(config, fuse).lanes_for(tensor), block))
    if fuse.ulysses and context > 1:
        lanes = min(fuse.lanes or _MOST_LANES, context - 1)
        found.append(LanesOf("context", lanes, block / context))
    replicas = config.data_parallel_size * context
    if fuse.dp and replicas > 1:
        lanes = _DIRECTIONS * min(fuse.lanes or DATA_PARALLEL_LANES, replicas - 1)
        overlapped = "--overlap-grad-reduce" in launch.options
        bucket = value_of(launch.options, "--ddp-bucket-size")
        parameters = int(bucket) if bucket else max(_BUCKET, 1_000_000 * replicas)
        found.append(LanesOf("data", lanes, 4 * parameters / replicas if overlapped else None))
    return found


def groups_of(launch: Launch) -> list[str]:
    """Megatron's groups of more than one rank, a communicator each, and that of the whole job."""
    config = launch.config
    sizes = {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "data": config.data_parallel_size,
    }
    found = [name for name, size in sizes.items() if size > 1]
    # Of the first and last stage, of model parallelism, of data with context.
    return ["all", *found, *(f"{name} with others" for name in found)]


def check_transfers(
    machine: Machine, launch: Launch, layers: Sequence[FusedLayer]
) -> Iterator[Finding]:
    """What the lanes cost in memory, and whether a transfer fits HCCL's buffer at once."""
    made = lanes_of(launch)
    if not made:
        return
    group_buffer = value_of(launch.options, "--hccl-group-buffer") or ""
    own = re.search(r"(?:^|[;,])\s*commfuse:(\d+)", group_buffer)
    general = launch.variables.get("HCCL_BUFFSIZE", machine.variables.get("HCCL_BUFFSIZE", "200"))
    usual = int(general) if general.isdecimal() else 200

    def megabytes_of(message: float | None) -> int:
        if own:
            return int(own[1])
        # The feature sizes lanes to their messages, unless the option is there for others.
        return usual if group_buffer or message is None else lane_megabytes(message)

    largest = max((layer.longest for layer in layers), default=0)
    needed, (kind, lanes, _) = -(-largest // 2**20), made[0]
    of_each = [
        (one, megabytes_of(largest if one.kind == "tensor" else one.message)) for one in made
    ]
    said = ", ".join(f"{one.lanes} {one.kind} lanes with 2 x {size} MB" for one, size in of_each)
    total = sum(2 * one.lanes * size for one, size in of_each)
    action = "nothing uses them: leave --use-commfuse out"
    if largest:
        action = (
            f"--hccl-group-buffer commfuse:{needed} takes "
            f"{2 * sum(one.lanes for one in made) * needed} MB and still holds the largest transfer"
        )
    elif len(made) > 1 or kind != "tensor":
        action = "--hccl-group-buffer commfuse:64 sets the size of each"
    yield _about("memory for lanes", "note", f"{total} MB per NPU: {said}", action=action)
    if kind != "tensor":
        return
    megabytes = of_each[0][1]
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
