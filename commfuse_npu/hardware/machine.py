"""A machine with one value for every figure, and what computing costs on it.

The formulas are a roofline (Williams, Waterman, Patterson 2009): work takes the longer of its
arithmetic and its memory traffic.  A GEMM is whole tiles, on so many cores at a time, after a
start: cutting one costs a start, and the cores that the last round of tiles leaves idle.  Where the
cores are not known, and in attention, a cut costs ``half_rows`` rows: efficiency is
``m / (m + half_rows)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ITEM_BYTES",
    "SUM_BYTES",
    "TILE",
    "FusedKernel",
    "Level",
    "LinkTopology",
    "Machine",
    "covering_outputs",
]

LinkTopology = Literal["full_mesh", "switched", "nic_per_npu", "nic_per_node"]

ITEM_BYTES = 2
"""Activations and weights are bf16."""
SUM_BYTES = 4
"""Sums that are rounded once are fp32."""

TILE = 128, 256
"""Rows and columns that a core of the cube makes at a time (read in Huawei's tiling of MC2)."""


@dataclass(frozen=True)
class Level:
    """Links of one kind.

    Attributes:
        topology: ``full_mesh``: a link per ordered pair; ``switched`` and ``nic_per_npu``: an
            egress and an ingress per NPU; ``nic_per_node``: an egress and an ingress per node.
        rate: bytes/s per link and direction that a large message reaches.
        latency: seconds per transfer besides ``bytes / rate``.
        beside_work: how many times longer a transfer takes while an end of it is at work.
    """

    topology: LinkTopology
    rate: float
    latency: float
    beside_work: float = 1.0

    def into(self, ranks: int) -> float:
        """bytes/s into a rank of so many, from all others at once."""
        return (ranks - 1 if self.topology == "full_mesh" else 1) * self.rate


@dataclass(frozen=True)
class FusedKernel:
    """A kernel that computes and transfers at once, as others measured it.

    Attributes:
        hidden: share of the transfer that is hidden where the GEMM is longer.
        hidden_gemm: share of the GEMM that is hidden where the transfer is longer.
        rate: bytes/s per link and direction that its own transfer reaches.
    """

    hidden: float
    hidden_gemm: float
    rate: float

    def seconds(self, gemm: float, transfer: float) -> float:
        """Of a GEMM and a transfer that take so long alone."""
        share = self.hidden if gemm >= transfer else self.hidden_gemm
        return gemm + transfer - share * min(gemm, transfer)


NO_KERNEL = FusedKernel(0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Machine:
    """Point values; see ``configs/hardware/*.yaml`` for what they mean.

    Rates in FLOP/s and bytes/s, times in seconds, ``hbm_bandwidth`` with its efficiency.
    """

    npus_per_node: int
    cube_flops: float
    gemm_efficiency: float
    half_rows: float
    cores: int
    gemm_start: float
    attention_efficiency: float
    hbm_bandwidth: float
    transfer_slowdown: float
    launch_overhead: float
    post_overhead: float
    event_overhead: float
    inside: Level
    between: Level | None
    batched: bool
    message_copies: float = 0.0
    coc_fused: FusedKernel = NO_KERNEL
    catccos: FusedKernel = NO_KERNEL
    mc2_grows: float = 0.0
    ordered_sums: float = 0.0
    expert_launches: float = 36.0

    def gemm(
        self,
        rows: float,
        inner: float,
        outer: float,
        *,
        result_bytes: float = ITEM_BYTES,
        start: bool = True,
    ) -> float:
        """Seconds of ``[rows, inner] @ [inner, outer]``; 0 without rows.

        Args:
            result_bytes: read and written per number of the result.
            start: whether it starts by itself, and not inside a kernel that has started.
        """
        if rows <= 0 or inner <= 0:
            return 0.0
        if self.cores:
            tiles = math.ceil(rows / TILE[0]) * math.ceil(outer / TILE[1])
            made = float(math.ceil(tiles / self.cores) * self.cores * TILE[0] * TILE[1])
        else:
            made = (rows + self.half_rows) * outer
        flops = 2.0 * made * inner
        traffic = ITEM_BYTES * (rows * inner + inner * outer) + result_bytes * rows * outer
        return (self.gemm_start if start else 0.0) + max(
            flops / (self.cube_flops * self.gemm_efficiency), traffic / self.hbm_bandwidth
        )

    def attention(self, flops: float) -> float:
        """Seconds of flash attention of so many FLOP."""
        return flops / (self.cube_flops * self.attention_efficiency)

    def collective(self, size: float, ranks: int) -> float:
        """Seconds of blocks of so many bytes from each rank of a node to every other one."""
        return self.inside.latency + (ranks - 1) * size / self.inside.into(max(2, ranks))

    def host(self, launches: int, posts: int, events: int) -> float:
        """Seconds for which so many keep the launching thread."""
        launched = launches * self.launch_overhead + posts * self.post_overhead
        return launched + events * self.event_overhead

    def summed(self, ranks: int) -> float:
        """How many times longer HCCL's reduce-scatter takes for sums in an order."""
        return 1 + self.ordered_sums * ranks / 8

    def fused(self, kernel: FusedKernel, gemm: float, size: float, ranks: int) -> float:
        """Seconds of a GEMM with a collective over blocks of so many bytes in one kernel."""
        latency, slower = self.inside.latency, self.inside.rate / kernel.rate
        transfer = latency + slower * (self.collective(size, ranks) - latency)
        return kernel.seconds(gemm, transfer)

    def buffered(self, size: float) -> float:
        """Seconds that a message of so many bytes takes through buffers at both of its ends.

        A copy reads and writes, and is in order with the transfer.
        """
        ends, reads_and_writes = 2, 2
        return self.memory(ends * reads_and_writes * self.message_copies * size)

    def memory(self, traffic: float) -> float:
        """Seconds of element-wise work that reads and writes so many bytes."""
        return traffic / self.hbm_bandwidth


def covering_outputs(machine: Machine, size: int) -> int | None:
    """From how many outputs per rank Megatron's order hides a column-parallel backward's transfers.

    There the input is gathered behind dgrad, and its gradient reduce-scattered behind wgrad: over
    ``S x I`` numbers each of these GEMMs takes ``2 * S * I * O`` FLOP, and each transfer
    ``(n-1)/n * S * I`` numbers into a rank, over all links to its peers at once, beside work.

    Args:
        size: of the tensor-parallel group.

    Returns:
        O, or ``None`` if the group spans nodes or has one rank.
    """
    if not 1 < size <= machine.npus_per_node:
        return None
    inside = machine.inside
    transfer = 2.0 * (size - 1) / size * inside.beside_work / inside.into(size)
    return math.ceil(transfer * machine.cube_flops * machine.gemm_efficiency / 2)
