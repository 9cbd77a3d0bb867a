"""A machine with one value for every figure, and what computing costs on it.

The formulas are a roofline (Williams, Waterman, Patterson 2009): work takes the longer of its
arithmetic and its memory traffic.  GEMM efficiency falls with the number of rows ``m`` as
``m / (m + half)``: a fixed cost of ``half`` rows per GEMM, which is what cutting a GEMM costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ITEM_BYTES", "SUM_BYTES", "Level", "LinkTopology", "Machine"]

LinkTopology = Literal["full_mesh", "switched", "nic_per_npu", "nic_per_node"]

ITEM_BYTES = 2
"""Activations and weights are bf16."""
SUM_BYTES = 4
"""Sums that are rounded once are fp32."""


@dataclass(frozen=True)
class Level:
    """Links of one kind.

    Attributes:
        topology: ``full_mesh``: a link per ordered pair; ``switched`` and ``nic_per_npu``: an
            egress and an ingress per NPU; ``nic_per_node``: an egress and an ingress per node.
        rate: bytes/s per link and direction that a large message reaches.
        latency: seconds per transfer besides ``bytes / rate``.
    """

    topology: LinkTopology
    rate: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """Point values; see ``configs/hardware/*.yaml`` for what they mean.

    Rates in FLOP/s and bytes/s, times in seconds, ``hbm_bandwidth`` with its efficiency.
    """

    npus_per_node: int
    cube_flops: float
    gemm_efficiency: float
    gemm_half_rows: float
    attention_efficiency: float
    hbm_bandwidth: float
    transfer_slowdown: float
    launch_overhead: float
    inside: Level
    between: Level | None
    batched: bool

    def gemm(
        self, rows: float, inner: float, outer: float, *, result_bytes: float = ITEM_BYTES
    ) -> float:
        """Seconds of ``[rows, inner] @ [inner, outer]``; 0 without rows.

        Args:
            result_bytes: read and written per number of the result.
        """
        if rows <= 0 or inner <= 0:
            return 0.0
        flops = 2.0 * (rows + self.gemm_half_rows) * inner * outer
        traffic = ITEM_BYTES * (rows * inner + inner * outer) + result_bytes * rows * outer
        return max(flops / (self.cube_flops * self.gemm_efficiency), traffic / self.hbm_bandwidth)

    def attention(self, flops: float) -> float:
        """Seconds of flash attention of so many FLOP."""
        return flops / (self.cube_flops * self.attention_efficiency)

    def memory(self, traffic: float) -> float:
        """Seconds of element-wise work that reads and writes so many bytes."""
        return traffic / self.hbm_bandwidth
