"""Where GEMMs hide collectives by themselves, so that there is nothing left to take apart."""

from __future__ import annotations

import math

from commfuse_npu.tools.simulate.machine import Machine

__all__ = ["covering_outputs"]


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
