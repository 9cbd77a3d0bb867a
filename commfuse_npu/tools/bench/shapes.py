"""The sizes of what is measured: a model's, scaled down to what a CPU does in a tenth of a second.

No torch here: the process that starts the ranks need not have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from commfuse_npu.tools.model_config import ModelConfig

__all__ = [
    "COLLECTIVES",
    "ITEM_BYTES",
    "LAYERS",
    "MICROBATCHES",
    "WORKS",
    "Shape",
    "bytes_per_pair",
    "default_scale",
]

Collective = Literal["gather", "scatter"]

ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2}

# Column-parallel layer forward; row-parallel forward; its backward; the column's backward, which
# gathers its input again instead of keeping N times the memory (Megatron's way).
_BLOCK: tuple[Collective, ...] = ("gather", "scatter", "gather", "gather", "scatter")

COLLECTIVES: dict[str, tuple[Collective, ...]] = {
    "all-gather": ("gather",),
    "reduce-scatter": ("scatter",),
    "mlp": _BLOCK,
    "attention": _BLOCK,
    "layer": (*_BLOCK, *_BLOCK),
    "layers": (*_BLOCK, *_BLOCK) * 2,
    "micro-batches": (*_BLOCK, *_BLOCK) * 2 * 8,
}
"""The collectives of each work, each over blocks of ``[s, H]``."""

WORKS: dict[str, str] = {
    "all-gather": "all-gather -> GEMM (the MLP's first, forward)",
    "reduce-scatter": "GEMM -> reduce-scatter (the MLP's second, forward)",
    "mlp": "MLP block, forward and backward with weight gradients",
    "attention": "attention block, forward and backward with weight gradients",
    "layer": "a whole Llama layer, forward and backward with weight gradients",
    "layers": "two Llama layers in a row, forward and backward with weight gradients",
    "micro-batches": "eight micro-batches of two Llama layers, gradients added up",
}

LAYERS: dict[str, int] = {work: 2 if work in ("layers", "micro-batches") else 1 for work in WORKS}
"""How many sets of weights a work has."""

MICROBATCHES: dict[str, int] = {work: 8 if work == "micro-batches" else 1 for work in WORKS}
"""How often a work runs, forward and backward."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer, of all ranks together.

    Attributes:
        sequence: S, rows of the GEMMs (micro-batch 1).
        hidden: H.
        ffn: width of the MLP; gate and up are as wide each.
        heads, groups: query heads and key heads.
        head: features of a head.
        scale: how many times narrower than the model's layer it is.
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

        Rounded down so that ``ranks`` share everything evenly, in blocks of whole cache lines, and
        up to one such block where it is less.

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
        heads = scaled(model.num_attention_heads, groups)
        return cls(
            sequence=max(1, (sequence or model.seq_length // 4) // (16 * ranks)) * 16 * ranks,
            hidden=scaled(model.hidden_size, 16 * ranks),
            ffn=scaled(model.ffn_hidden_size, 16 * ranks),
            heads=heads,
            groups=groups,
            head=model.hidden_size // model.num_attention_heads,
            scale=scale,
        )

    def __str__(self) -> str:
        return (
            f"S {self.sequence}, H {self.hidden}, FFN {self.ffn}, {self.heads} heads of "
            f"{self.head}, {self.groups} key heads"
        )


def default_scale(work: str) -> float:
    """A single GEMM may be larger than a block forward and backward: all take 0.05 to 0.3 s."""
    return 16 / 3 if work in ("all-gather", "reduce-scatter") else 8


def bytes_per_pair(work: str, shape: Shape, ranks: int, dtype: str) -> int:
    """What one rank sends to one other rank in one run of the work, in bytes."""
    block = shape.sequence // ranks * shape.hidden * ITEM_BYTES[dtype]
    return block * len(COLLECTIVES[work])
