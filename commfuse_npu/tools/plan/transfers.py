"""What is fused in a launch, and the cost of the transfers: messages, lanes and their memory.

At run time the wrappers of Megatron's layers and self-attention decide; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from commfuse_npu.plan import DATA_PARALLEL_LANES, PlanError, Schedule
from commfuse_npu.runtime.hccl_options import lane_megabytes
from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.linear_layers import attention_obstacle
from commfuse_npu.tools.plan.launch import AskedLaunch
from commfuse_npu.tools.simulate.data_parallel import bucket_parameters

__all__ = ["FusedLayer", "Lanes", "check_lanes", "fused_layers", "groups_of", "lanes_of"]

_finding = partial(Finding, "launch")


class FusedLayer(NamedTuple):
    """A kind of linear layer, and its forward on one rank.

    Attributes:
        layer: its name.
        operator: the op that runs in the forward; empty for Megatron's own.
        reason: why Megatron's own forward runs, or empty.
        transfers: messages that a rank sends in the forward, or collectives.
        transfer_bytes: of the largest of them; for a collective, what it sends or receives.
        longest: bytes of the longest message, including the backward: a column-parallel layer
            gathers its input again in whole blocks.
    """

    layer: str
    operator: str
    reason: str
    transfers: int = 0
    transfer_bytes: int = 0
    longest: int = 0

    def __str__(self) -> str:
        if not self.operator:
            return f"{self.layer}: Megatron's own forward, because {self.reason}"
        size = f"{self.transfer_bytes / 2**20:.2f} MB"
        return f"{self.layer}: {self.operator}, {self.transfers} transfers of {size}"


def fused_layers(launch: AskedLaunch) -> list[FusedLayer]:
    """What happens to each linear layer with ``--use-commfuse``, whether or not it is given.

    Args:
        launch: with a configuration that :meth:`~ModelConfig.validate` accepts, and a schedule.
    """
    config, limit = launch.config, launch.judged.least
    tp, sequence = config.tensor_model_parallel_size, config.uses_sequence_parallel
    # What one rank sends to, or gets from, each other rank: s*B rows of H numbers.
    halves = config.bf16 or "--fp16" in launch.options
    rows, row_bytes = config.block_rows, config.hidden_size * (2 if halves else 4)
    queries = config.seq_length // config.context_parallel_size // (tp if sequence else 1)
    layers = []
    attention = launch.fuse.commfuse_attention and not attention_obstacle(launch.options)
    for layer, _, reason, column in launch.judged.layers:
        chunks = launch.schedule.chunks
        chunk_rows = -(-rows // chunks)
        operator = "linear_reduce_scatter" if sequence else "linear_all_reduce"
        if column:
            operator = "all_gather_linear"
        elif layer == "proj" and attention:
            # Queries are split, not rows of s*B: a chunk has at least one query.
            operator, chunks = "attention_linear_reduce_scatter", min(chunks, queries)
            chunk_rows = -(-queries // chunks) * config.micro_batch_size
        if not reason and rows < limit:
            reason = f"a block has fewer than {limit} rows"
        if reason:
            layers.append(FusedLayer(layer, "", reason))
            continue
        # An all-reduce is a reduce-scatter and an all-gather of its result.
        parts = 2 if operator == "linear_all_reduce" else 1
        blocks = launch.schedule.blocks_at_once(tp)
        sent = parts * chunks * (1 if blocks > 1 else tp - 1)
        largest = blocks * chunk_rows * row_bytes
        longest = blocks * rows * row_bytes if column else largest
        layers.append(FusedLayer(layer, operator, "", sent, largest, longest))
    return layers


class Lanes(NamedTuple):
    """The lanes of a rank in one kind of group; bytes of the longest message, if known."""

    kind: str
    lanes: int
    message: float | None


_DIRECTIONS = 2
"""Gradients and parameters have separate lanes."""


def lanes_of(launch: AskedLaunch) -> list[Lanes]:
    """The lanes that a launch creates for tensor, context and data parallelism."""
    config, fuse = launch.config, launch.fuse
    if not fuse.use_commfuse:
        return []
    groups = []
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    block = config.block_rows * config.hidden_size * 2.0
    if tensor > 1:
        with suppress(PlanError):  # which is reported elsewhere
            schedule = launch.schedule
            message = block * schedule.blocks_at_once(tensor)
            groups.append(Lanes("tensor", schedule.lanes_for(tensor), message))
    if fuse.commfuse_ulysses and context > 1:
        lanes = min(Schedule(lanes=fuse.commfuse_lanes).lanes_for(context), context - 1)
        groups.append(Lanes("context", lanes, block / context))
    replicas = config.data_parallel_size * context
    if fuse.commfuse_dp and replicas > 1:
        lanes = _DIRECTIONS * min(fuse.commfuse_lanes or DATA_PARALLEL_LANES, replicas - 1)
        bucket = launch.options.number("--ddp-bucket-size", bucket_parameters(replicas))
        overlapped = "--overlap-grad-reduce" in launch.options
        groups.append(Lanes("data", lanes, 4 * bucket / replicas if overlapped else None))
    return groups


def groups_of(launch: AskedLaunch) -> list[str]:
    """Megatron's groups with more than one rank, each a communicator, and that of the whole job."""
    kinds = "tensor_model", "pipeline_model", "context", "data"
    groups = [kind for kind in kinds if getattr(launch.config, f"{kind}_parallel_size") > 1]
    # Groups of the first and last stage, of model parallelism, of data with context parallelism.
    return ["all", *groups, *(f"{name} with others" for name in groups)]


def check_lanes(launch: AskedLaunch, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The memory that lanes take, and whether a transfer fits HCCL's buffer at once.

    Args:
        launch: as for :func:`fused_layers`.
        environ: where the launch is started; variables that it sets itself take precedence.
    """
    groups = lanes_of(launch)
    if not groups:
        return
    general = {**environ, **launch.variables}.get("HCCL_BUFFSIZE", "200")
    usual = int(general) if general.isdecimal() else 200

    def megabytes_of(message: float | None) -> int:
        return usual if message is None else lane_megabytes(message)

    largest = max((layer.longest for layer in fused_layers(launch)), default=0)
    sizes = [megabytes_of(largest if group.kind == "tensor" else group.message) for group in groups]
    pairs = list(zip(groups, sizes, strict=True))
    text = ", ".join(
        f"{group.lanes} {group.kind} lanes with 2 x {size} MB" for group, size in pairs
    )
    total = sum(2 * group.lanes * size for group, size in pairs)
    unused = not largest and [group.kind for group in groups] == ["tensor"]
    action = "nothing uses them: leave --use-commfuse out" if unused else ""
    yield _finding("memory for lanes", "note", f"{total} MB per NPU: {text}", action=action)
    if groups[0].kind == "tensor" and largest > sizes[0] * 2**20:
        expected = f"at most HCCL's buffer of {sizes[0]} MB: larger ones go in several rounds"
        fix = "choose a smaller --micro-batch-size"
        yield _finding("largest transfer", "warning", f"{largest / 2**20:.1f} MB", expected, fix)
