"""The workloads and forms that are compared, and their sizes.

Does not import torch, which the process that asks the ranks need not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.measure.measuring_steps import Scale

_BLOCK = 16
"""Tokens of a rank are a multiple of this: whole cache lines, as all widths."""

COMPUTE = "compute"
REFERENCE = "p2p"
TUNED = "auto"
NAMES = (
    *(REFERENCE, "slices-2", "slices-4", "slices-8", "megatron", "ours-c1", "ours-c4", "ours-c8"),
    TUNED,
)
"""The forms that can be compared (:mod:`.forms_worker`), the reference first."""


def scale_of(config: str, ranks: int) -> Scale:
    """The sizes of a model on a CPU, with about 2,048 tokens.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    multiple = _BLOCK * ranks
    scale = Scale.of(find_config(config), ranks, "cpu")
    return replace(scale, rows=2048 // multiple * multiple)


class WorkKind(NamedTuple):
    """A workload, forward and backward with weight gradients, in which forms are compared.

    Attributes:
        pairs: number of column-parallel layers, each followed by a row-parallel one.
        layers: number of layers, each with its own weights.
    """

    pairs: int
    layers: int = 1

    def bytes_per_pair(self, scale: Scale) -> int:
        """Bytes that one rank sends to another in one run, in fp32.

        A pair of layers has five collectives over blocks of ``[s, H]``: the backward of the first
        gathers its input again instead of keeping N times the memory (as Megatron does).
        """
        block = scale.rows // scale.ranks * scale.hidden * 4
        return block * 5 * self.pairs


WORKS: Mapping[str, WorkKind] = {
    "mlp": WorkKind(1),
    "layers": WorkKind(4, 2),
}
"""An MLP, and two layers."""
