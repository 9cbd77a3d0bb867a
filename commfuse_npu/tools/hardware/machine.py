"""A machine with one value for every figure, and the time that work takes on it.

The formulas are a roofline (Williams, Waterman, Patterson 2009): work takes the longer of its
arithmetic and its memory traffic.  A GEMM takes a start time and then rounds of whole tiles, one
per core.  So cutting it costs a start, and idle cores in the last round of each part.  In
attention, and if the number of cores is unknown, ``m`` rows have the efficiency
``m / (m + half_rows)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

LinkTopology = Literal["full_mesh", "switched", "nic_per_npu"]

ITEM_BYTES = 2
"""Activations and weights are bf16."""

TILE = 128, 256
"""Rows and columns that a cube core computes at a time (read in Huawei's tiling of MC2)."""


@dataclass(frozen=True)
class Level:
    """Links of one kind.

    Attributes:
        topology: ``full_mesh``: a link per ordered pair; ``switched`` and ``nic_per_npu``: an
            egress and an ingress per NPU.
        rate: bytes/s per link and direction that a large message reaches.
        latency: seconds per transfer besides ``bytes / rate``.
        beside_work: factor by which a transfer is slower while one of its ends computes.
    """

    topology: LinkTopology
    rate: float
    latency: float
    beside_work: float = 1.0

    def into(self, ranks: int) -> float:
        """bytes/s into one of ``ranks`` ranks, from all others at once."""
        return (ranks - 1 if self.topology == "full_mesh" else 1) * self.rate


@dataclass(frozen=True)
class Machine:
    """One value per figure; ``configs/hardware/*.yaml`` explains the figures.

    Rates in FLOP/s and bytes/s, times in seconds; ``hbm_bandwidth`` includes its efficiency.
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
    message_copies: float = 0.0
    coc_fused_hidden: float = 0.0
    coc_fused_hidden_gemm: float = 0.0
    coc_fused_efficiency: float = 1.0
    ordered_sums: float = 0.0
    expert_launches: float = 36.0

    @property
    def launching_for_free(self) -> Machine:
        """The machine with a host that takes no time for launches, posts and events."""
        return replace(self, launch_overhead=0.0, post_overhead=0.0, event_overhead=0.0)

    def gemm(self, rows: float, inner: float, outer: float, *, start: bool = True) -> float:
        """Seconds of ``[rows, inner] @ [inner, outer]``; 0 without rows.

        Args:
            start: whether to include the start time; not for a part of a running kernel.
        """
        if rows <= 0 or inner <= 0:
            return 0.0
        if self.cores:
            tiles = math.ceil(rows / TILE[0]) * math.ceil(outer / TILE[1])
            elements = float(math.ceil(tiles / self.cores) * self.cores * TILE[0] * TILE[1])
        else:
            elements = (rows + self.half_rows) * outer
        flops = 2.0 * elements * inner
        traffic = ITEM_BYTES * (rows * inner + inner * outer + rows * outer)
        return (self.gemm_start if start else 0.0) + max(
            flops / (self.cube_flops * self.gemm_efficiency), traffic / self.hbm_bandwidth
        )

    def attention(self, flops: float) -> float:
        """Seconds of flash attention with ``flops`` FLOP."""
        return flops / (self.cube_flops * self.attention_efficiency)

    def collective(self, size: float, ranks: int) -> float:
        """Seconds to send a block of ``size`` bytes from each rank of a node to every other one."""
        return self.inside.latency + (ranks - 1) * size / self.inside.into(max(2, ranks))

    def host(self, launches: float, posts: int, events: int) -> float:
        """Seconds that launches, posts and events take on the launching thread."""
        launched = launches * self.launch_overhead + posts * self.post_overhead
        return launched + events * self.event_overhead

    def summed(self, ranks: int) -> float:
        """Factor by which HCCL's reduce-scatter is slower if it sums in a fixed order."""
        return 1 + self.ordered_sums * ranks / 8

    def coc_kernel(self, gemm: float, size: float, ranks: int) -> float:
        """Seconds of CoC's kernel with a GEMM and a collective over blocks of ``size`` bytes.

        It hides a share of the shorter of both.  Its efficiency is relative to ``inside.rate``.
        """
        latency = self.inside.latency
        transfer = latency + (self.collective(size, ranks) - latency) / self.coc_fused_efficiency
        hidden = self.coc_fused_hidden if gemm >= transfer else self.coc_fused_hidden_gemm
        return gemm + transfer - hidden * min(gemm, transfer)

    def buffered(self, size: float) -> float:
        """Seconds of the copies of a ``size``-byte message through buffers at both of its ends.

        A copy reads and writes memory, and does not overlap with the transfer.
        """
        return self.memory(2 * 2 * self.message_copies * size)

    def memory(self, traffic: float) -> float:
        """Seconds of element-wise work that reads and writes ``traffic`` bytes in all."""
        return traffic / self.hbm_bandwidth


def min_outputs_to_hide(machine: Machine, size: int) -> int | None:
    """The least outputs per rank with which a column-parallel backward's GEMMs hide its transfers.

    This is about the unfused backward in Megatron's order, which gathers the input during dgrad and
    reduce-scatters its gradient during wgrad.  Each of the two GEMMs takes ``2 * S * I * O`` FLOP.
    Each collective brings ``(n-1)/n * S * I`` elements into a rank, over the links from all peers
    at once, slowed down by the work.

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
