"""A case describes one random call of the ops; its ``repr`` is the Python that repeats it.

A case holds numbers and options only; each rank draws its tensors from the seed.  Values are
integers so small that every sum is exact in any order: results of the fused op and of its formula
have to be equal bit for bit.  For ``rounded`` values this holds for :data:`BITS_OF_TORCH`; other
ops, and attention always, have to equal the plain form that is cut into the same pieces.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from commfuse_npu.plan import Schedule

Layout = Literal["plain", "transposed", "sliced", "offset", "expanded"]
"""Memory layout of a tensor.  ``expanded``: one row with stride 0, like the gradient of a sum."""

Recompute = Literal["no", "reentrant", "non_reentrant"]

Form = Literal["fused", "plain", "exact"]
"""How a case is computed: by the fused op; by its formula, or by collectives in the same pieces; by
the formula in fp64."""

FROM_SHARD = ("all_gather_linear", "linear_all_to_all", "linear_all_reduce")
"""Ops whose input on a rank is a shard of the sequence."""

WITH_PROJECTION = "attention_all_to_all with a weight"
"""The name of ``attention_all_to_all`` with a projection, in errors too."""

ATTENTION = ("attention_linear_reduce_scatter", "attention_all_to_all", WITH_PROJECTION)
FROM_WHOLE = ("linear_reduce_scatter", "all_to_all_linear", *ATTENTION, "linear_all_reduce")
"""Ops whose input on a rank has all rows of the sequence."""

BITS_OF_TORCH = ("all_gather_linear", "linear_reduce_scatter")
"""Ops with the bits of torch's collectives and one GEMM over all rows, where a part of it rounds as
the whole does: see :func:`tests.random_networks.values.round_once`."""

LANES = 4
"""Lanes of the ranks; a case uses the first ``lanes`` of them."""

HEAD_FEATURES = 16
"""Features of an attention head: rows of all heads are multiples of 64 bytes, for equal bits."""


@dataclass(frozen=True)
class Layer:
    """One call of an op.

    Attributes:
        op: name of the fused op, or :data:`WITH_PROJECTION`.
        inputs, outputs: features of this rank; attention has ``queries`` and ``keys`` instead of
            inputs.
        bias: no bias, a frozen one, or one with a gradient.
        wide: ``reduce_dtype`` is fp32.
        flag: Megatron's ``grad_added_to_main_grad``.
        mask: kind of attention mask, see :mod:`tests.attention_masks`.
        trained: which of the heads ``q``, ``k`` and ``v`` get a gradient.
    """

    op: str
    inputs: int = 1
    outputs: int = 1
    bias: Literal["no", "frozen", "trained"] = "no"
    weight_grad: bool = True
    x_layout: Layout = "plain"
    weight_layout: Layout = "plain"
    grad_layout: Layout = "plain"
    schedule: Schedule = Schedule()
    wide: bool = False
    collectives_from: int | None = None
    main_grad: torch.dtype | None = None
    flag: bool = False
    recompute: Recompute = "no"
    queries: int = 2
    keys: int = 2
    mask: str = "full"
    scale: float | None = None
    trained: str = "qkv"


@dataclass(frozen=True)
class Network:
    """Layers in a chain or in parallel branches on one input, with one backward.

    Attributes:
        rows, batch: shape of one rank's shard of the sequence; ``[rows, features]`` without batch.
        branches: all layers take the same input.
        micro_batches: number of forwards, followed by as many backwards.
        last_first: the backward of the last micro-batch comes first.
        rounded: values are random floats, not integers.
        lanes: number of lanes of the transport.
    """

    size: int
    layers: tuple[Layer, ...]
    seed: int = 0
    dtype: torch.dtype = torch.float32
    rows: int = 1
    batch: int | None = None
    x_grad: bool = True
    branches: bool = False
    micro_batches: int = 1
    last_first: bool = False
    gradients: bool = True
    lanes: int = LANES
    rounded: bool = False


OPS = tuple(dict.fromkeys((*FROM_SHARD, *FROM_WHOLE)))


def one_layer(op: str, size: int, **changes: Any) -> Network:
    """A network of one layer on rounded values, with typical parameters and options.

    Args:
        changes: attributes of the layer or of the network, by name.
    """
    layer = Layer(op, 32, 32, "trained", schedule=Schedule(lanes=2, chunks=2), mask="causal")
    names = {field.name for field in fields(Layer)} & changes.keys()
    layer = replace(layer, **{name: changes.pop(name) for name in names})
    if op in ATTENTION:
        layer = replace(layer, inputs=(layer.queries + 2 * layer.keys) * HEAD_FEATURES)
    return Network(size, (layer,), **{"rows": 6, "batch": 2, "rounded": True} | changes)


@dataclass(frozen=True)
class Bucket:
    """One bucket of ``elements`` per rank.

    Attributes:
        gather: all-gather the bucket; otherwise reduce-scatter it.
    """

    elements: int
    gather: bool = False
    dtype: torch.dtype = torch.float32
    average: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class BucketRun:
    """Several concurrent buckets; every rank waits for them in its own order.

    Attributes:
        scratch_bytes: instead of :data:`commfuse_npu.ops.buckets.SCRATCH_BYTES`.
    """

    size: int
    buckets: tuple[Bucket, ...]
    seed: int = 0
    schedule: Schedule = Schedule()
    wide: bool = False
    scratch_bytes: int = 1 << 20
    lanes: int = LANES
    rounded: bool = False


Case = Network | BucketRun
