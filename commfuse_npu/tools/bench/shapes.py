"""Sizes of the workloads: a model's, scaled down to about a tenth of a second on a CPU.

Does not import torch, which the process that starts the ranks need not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["ITEM_BYTES", "WORKS", "Shape", "WorkKind"]

ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2}

# Column-parallel layer forward; row-parallel forward; its backward; the column's backward, which
# gathers its input again instead of keeping N times the memory (as Megatron does).
_BLOCK = ("gather", "scatter", "gather", "gather", "scatter")


class WorkKind(NamedTuple):
    """A kind of workload.

    Attributes:
        title: for headings.
        collectives: ``gather`` or ``scatter``, each over blocks of ``[s, H]``.
        layers: number of layers, each with its own weights.
        micro_batches: number of forwards and backwards per run.
        scale: default divisor of a model's widths; with it every workload takes 0.05 to 0.3 s.
    """

    title: str
    collectives: tuple[str, ...]
    layers: int = 1
    micro_batches: int = 1
    scale: float = 8

    @property
    def backward(self) -> bool:
        """Whether it has a backward; single GEMMs run forward only."""
        return len(self.collectives) > 1

    def bytes_per_pair(self, shape: Shape, ranks: int, dtype: str) -> int:
        """Bytes that one rank sends to another in one run."""
        block = shape.sequence // ranks * shape.hidden * ITEM_BYTES[dtype]
        return block * len(self.collectives)


_TRAINED = "forward and backward with weight gradients"

WORKS: dict[str, WorkKind] = {
    "all-gather": WorkKind(
        "all-gather -> GEMM (the MLP's first, forward)", ("gather",), scale=16 / 3
    ),
    "reduce-scatter": WorkKind(
        "GEMM -> reduce-scatter (the MLP's second, forward)", ("scatter",), scale=16 / 3
    ),
    "mlp": WorkKind(f"MLP block, {_TRAINED}", _BLOCK),
    "attention": WorkKind(f"attention block, {_TRAINED}", _BLOCK),
    "layer": WorkKind(f"a whole Llama layer, {_TRAINED}", _BLOCK * 2),
    "layers": WorkKind(f"two Llama layers in a row, {_TRAINED}", _BLOCK * 4, 2),
    "micro-batches": WorkKind(
        "eight micro-batches of two Llama layers, gradients added up", _BLOCK * 4 * 8, 2, 8
    ),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer, over all ranks.

    Attributes:
        sequence: S, rows of the GEMMs (micro-batch 1).
        hidden: H.
        ffn: width of the MLP; gate and up have this width each.
        heads, groups: query heads and key heads.
        head: features of a head.
        scale: factor by which it is narrower than the model's layer.
    """

    sequence: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    scale: float = 1.0

    @classmethod
    def of_model(cls, config: Path, ranks: int, scale: float, sequence: int | None) -> Shape:
        """A model's layer with every width divided by ``scale``; heads keep their width.

        Sizes are rounded so that ``ranks`` divide them evenly into blocks of whole cache lines, and
        are at least one such block.

        Args:
            config: ``configs/<model>.yaml``.
            sequence: S; a quarter of the model's by default.

        Raises:
            ConfigError: the file cannot be read.
        """
        model = ModelConfig.load(config)

        def scaled(width: float, multiple: int) -> int:
            return max(1, round(width / scale / multiple)) * multiple

        groups = scaled(model.num_query_groups, ranks)
        return cls(
            sequence=max(1, (sequence or model.seq_length // 4) // (16 * ranks)) * 16 * ranks,
            hidden=scaled(model.hidden_size, 16 * ranks),
            ffn=scaled(model.ffn_hidden_size, 16 * ranks),
            heads=scaled(model.num_attention_heads, groups),
            groups=groups,
            head=model.hidden_size // model.num_attention_heads,
            scale=scale,
        )

    def __str__(self) -> str:
        return (
            f"S {self.sequence}, H {self.hidden}, FFN {self.ffn}, {self.heads} heads of "
            f"{self.head}, {self.groups} key heads"
        )
