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
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.layers import FusedLayer
from commfuse_npu.tools.doctor.machine import Machine

__all__ = ["Lanes", "check_transfers", "groups_of", "lanes_of"]

_about = partial(Finding, "launch")


class Lanes(NamedTuple):
    """The lanes of a rank in one kind of group, and bytes of the longest message if known."""

    kind: str
    lanes: int
    message: float | None


_MOST_LANES = 7
"""By default (:meth:`~commfuse_npu.plan.Schedule.lanes_for`)."""
_DIRECTIONS = 2
"""Gradients and parameters have lanes of their own."""
_BUCKET = 40_000_000
"""Parameters, at least, of a bucket of Megatron's (core 0.12) with ``--overlap-grad-reduce``."""


def lanes_of(launch: Launch) -> list[Lanes]:
    """Those that a launch makes: of tensor, data and context parallelism."""
    config, fuse = launch.config, launch.fuse
    if not fuse.use_commfuse:
        return []
    found = []
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    block = config.block_rows * config.hidden_size * 2.0
    if tensor > 1:
        with suppress(PlanError):  # which says more elsewhere
            found.append(Lanes("tensor", launch.schedule.lanes_for(tensor), block))
    if fuse.commfuse_ulysses and context > 1:
        lanes = min(fuse.commfuse_lanes or _MOST_LANES, context - 1)
        found.append(Lanes("context", lanes, block / context))
    replicas = config.data_parallel_size * context
    if fuse.commfuse_dp and replicas > 1:
        lanes = _DIRECTIONS * min(fuse.commfuse_lanes or DATA_PARALLEL_LANES, replicas - 1)
        bucket = launch.options.number("--ddp-bucket-size", max(_BUCKET, 1_000_000 * replicas))
        overlapped = "--overlap-grad-reduce" in launch.options
        found.append(Lanes("data", lanes, 4 * bucket / replicas if overlapped else None))
    return found


def groups_of(launch: Launch) -> list[str]:
    """Megatron's groups of more than one rank, a communicator each, and that of the whole job."""
    kinds = "tensor_model", "pipeline_model", "context", "data"
    found = [kind for kind in kinds if getattr(launch.config, f"{kind}_parallel_size") > 1]
    # Of the first and last stage, of model parallelism, of data with context.
    return ["all", *found, *(f"{name} with others" for name in found)]


def check_transfers(
    machine: Machine, launch: Launch, layers: Sequence[FusedLayer]
) -> Iterator[Finding]:
    """What the lanes cost in memory, and whether a transfer fits HCCL's buffer at once."""
    made = lanes_of(launch)
    if not made:
        return
    group_buffer = launch.options.text("--hccl-group-buffer") or ""
    own = re.search(r"(?:^|[;,])\s*commfuse:(\d+)", group_buffer)
    general = launch.variables.get("HCCL_BUFFSIZE", machine.variables.get("HCCL_BUFFSIZE", "200"))
    usual = int(general) if general.isdecimal() else 200

    def megabytes_of(message: float | None) -> int:
        if own:
            return int(own[1])
        # The feature sizes lanes to their messages, unless the option is there for others.
        return usual if group_buffer or message is None else lane_megabytes(message)

    largest = max((layer.longest for layer in layers), default=0)
    needed, count = -(-largest // 2**20), sum(one.lanes for one in made)
    sizes = [megabytes_of(largest if one.kind == "tensor" else one.message) for one in made]
    pairs = list(zip(made, sizes, strict=True))
    said = ", ".join(f"{one.lanes} {one.kind} lanes with 2 x {size} MB" for one, size in pairs)
    total = sum(2 * one.lanes * size for one, size in pairs)
    action = "nothing uses them: leave --use-commfuse out"
    if largest:
        action = (
            f"--hccl-group-buffer commfuse:{needed} takes {2 * count * needed} MB and still holds "
            "the largest transfer"
        )
    elif [one.kind for one in made] != ["tensor"]:
        action = "--hccl-group-buffer commfuse:64 sets the size of each"
    yield _about("memory for lanes", "note", f"{total} MB per NPU: {said}", action=action)
    if made[0].kind != "tensor":
        return
    if launch.fuse.commfuse_tuning == "on":
        tried = f"up to 8 chunks and {made[0].lanes} lanes are tried at the first use of a shape"
        advice = (
            "the figures above are those of whole blocks; --commfuse-tuning off and the options "
            "that it logged give the same schedule in every run"
        )
        yield _about("tuning", "note", tried, action=advice)
    if needed > sizes[0]:
        expected = f"at most HCCL's buffer of {sizes[0]} MB: larger ones go in several rounds"
        fix = f"--hccl-group-buffer commfuse:{needed}"
        yield _about("largest transfer", "warning", f"{largest / 2**20:.1f} MB", expected, fix)
