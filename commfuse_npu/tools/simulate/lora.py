"""LoRA as MindSpeed-LLM 26.1.0 trains it: frozen weights, with an adapter beside those of targets.

An adapter of rank ``r`` adds ``x @ A^T @ B^T`` to a layer's product.  In a column-parallel layer
every rank has A and its rows of B, in a row-parallel one its columns of A, and B: between the two
products ``r`` columns are gathered or summed.  A frozen weight has a dgrad only, and its input is
not gathered again in the backward.

With ``--lora-fusion`` (``cc_lora_forward.py``) a layer and its adapter are one autograd function.
Where there are at least as many rows as inputs, it adds ``B @ A`` to the weight and multiplies
once; with sequence parallelism row-parallel layers run in MC2's kernels (:mod:`.linear_layers`). As
it takes the weight and does not call the layer, MC2, CoC and fused layers have no effect.  It
computes the gradient of its input in the first layer, too, so that no layer is cheaper than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from commfuse_npu.tools.simulate.llama import LayerShape
    from commfuse_npu.tools.simulate.rank import Rank

_KERNEL = 0.2
"""Launches per further kernel of a fused function.  ``host.launch_overhead``, 118 us, includes the
module and the autograd node of a kernel; a kernel by itself, synchronized, takes 19 to 31 us on a
910B3 (ascend-rs.org, appendix F)."""
_DEQUANTIZED = 1.25
"""Elements read and written per weight that is converted from 4 bits to bf16."""


@dataclass(frozen=True)
class Lora:
    """Adapters of a model.

    Attributes:
        rank: of the adapters.
        targets: Megatron's names of the layers that have one: ``linear_qkv``, ...
        fused: whether a layer and its adapter are one function.
        quantized: whether frozen weights of linear layers have 4 bits (``--qlora``).
    """

    rank: int
    targets: frozenset[str]
    fused: bool = False
    quantized: bool = False

    def adapts(self, name: str) -> bool:
        """Whether an operation of :mod:`.llama`, as ``fc1 backward``, is one of a target."""
        return f"linear_{name.split()[0]}" in self.targets


class Weight(NamedTuple):
    """The weight of a linear layer on one rank.

    Attributes:
        rows: of the product's inputs that a rank has by itself, and of its outputs.
        experts: number of local experts that have one and a part of the rows; 0: no experts.
        split: whether tensor-parallel ranks have parts of it.
    """

    name: str
    inputs: int
    outputs: int
    rows: tuple[int, int]
    experts: int = 0
    split: bool = True


def adapt(rank: Rank, shape: LayerShape, *, backward: bool = False) -> None:
    """Add the products of a layer's adapters, and the sums with those of the layer."""
    lora = shape.lora
    if not lora:
        return
    r = lora.rank
    for weight in filter(lambda weight: lora.adapts(weight.name), shape.weights):
        name = f"{weight.name} adapter"
        grouped = weight.experts and shape.experts and shape.experts.grouped
        layers = 1 if grouped else max(1, weight.experts)
        launches = layers * (_KERNEL if lora.fused and not grouped else 1.0)
        ends = [(weight.rows[0], weight.inputs), (weight.rows[1], weight.outputs)]
        (first, wide), (last, out) = reversed(ends) if backward else ends
        if lora.quantized:
            rank.elementwise(name, _DEQUANTIZED * wide * out, launches)
        elif lora.fused and not weight.experts and shape.rows >= weight.inputs:
            last = wide
        rank.gemm(name, first, wide, r, launches=launches)
        if weight.split:
            gathers = (weight.name in ("qkv", "fc1")) != backward
            transfer = rank.gathered if gathers else rank.summed
            rank.need(transfer(name, r * shape.block))
        rank.gemm(name, last, r, out, launches=launches)
        # The sum, and the product with alpha / r: of A or, without fusion, of as many elements.
        rank.elementwise(name, (3 if lora.fused else 5) * last * out, 2 * launches)
        if backward:
            # Both gradients, each added to that of earlier micro-batches.
            rank.gemm(name, weight.outputs, weight.rows[1], r, launches=launches + layers)
            rank.gemm(name, r, weight.rows[0], weight.inputs, launches=launches + layers)
