"""A case: everything about one random call of the ops, printed as the Python that makes it again.

A case holds numbers and options only; each rank draws its tensors from the seed.  Values are whole
numbers small enough that every sum is exact, in whatever order it is added: results of the fused op
and of its formula have to be equal, bit for bit.  Of ``rounded`` values, and of attention, results
have to be equal to those of the plain form that is cut into the same pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import Wgrad
from commfuse_npu.runtime.agreement import Check

Layout = Literal["plain", "transposed", "sliced", "offset", "expanded"]
"""How a tensor lies in memory.  ``expanded``: one row for all, as the gradient of a sum arrives."""

Recompute = Literal["no", "reentrant", "non_reentrant"]

Form = Literal["fused", "plain", "unsplit", "exact"]
"""Who computes a case: the op; its formula, or collectives and the same pieces; collectives and
whole matrices; the formula in fp64."""

FROM_SHARD = ("all_gather_linear", "linear_all_to_all", "linear_all_reduce", "sharded_linear")
"""Ops that may come where a rank holds some rows of the sequence."""

ATTENTION = (
    "attention_linear_reduce_scatter",
    "attention_all_to_all",
    "attention_all_to_all_linear",
)
FROM_WHOLE = (
    "linear_reduce_scatter",
    "all_to_all_linear",
    *ATTENTION,
    "linear_all_reduce",
    "sharded_linear",
)
"""Ops that may come where a rank holds all rows."""

LANES = 4
"""Lanes that the ranks have; a case uses some of them."""

HEAD_FEATURES = 16
"""Of an attention head: rows of all heads are multiples of 64 bytes, see the ops' exactness."""


@dataclass(frozen=True)
class Layer:
    """One call of an op.

    Attributes:
        op: name of the fused op.
        inputs, outputs: features of this rank; attention has ``queries`` and ``keys`` instead of
            inputs.
        bias: without it, a bias that is frozen, or one with a gradient.
        wide: ``reduce_dtype`` is fp32.
        shared: of :func:`linear_all_to_all`: rows of the weight that two ranks in a row both get.
        flag: Megatron's ``grad_added_to_main_grad``.
        mask: what queries of attention see, of :mod:`tests.attention_masks`.
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
    wgrad: Wgrad = "whole"
    keep_gathered: bool = False
    wide: bool = False
    main_grad: torch.dtype | None = None
    flag: bool = False
    recompute: Recompute = "no"
    average: bool = True
    shared: int = 0
    queries: int = 2
    keys: int = 2
    mask: str = "full"
    scale: float | None = None


@dataclass(frozen=True)
class Network:
    """Layers in a chain, or side by side on one input, before one backward.

    Attributes:
        rows, batch: of one rank's shard of the sequence; ``[rows, features]`` without a batch.
        uneven: rank r has r rows more; only ops whose ranks need not be alike.
        branches: side by side.
        micro_batches: that many forwards, then as many backwards.
        last_first: the backward of the last micro-batch comes first.
        rounded: values of any size, not whole numbers.
        lanes: of the transport.
    """

    size: int
    layers: tuple[Layer, ...]
    seed: int = 0
    dtype: torch.dtype = torch.float32
    rows: int = 1
    batch: int | None = None
    uneven: bool = False
    x_grad: bool = True
    branches: bool = False
    micro_batches: int = 1
    last_first: bool = False
    gradients: bool = True
    lanes: int = LANES
    batched: bool = False
    check: Check = "first"
    rounded: bool = False


OPS = tuple(dict.fromkeys((*FROM_SHARD, *FROM_WHOLE)))


def one_layer(op: str, size: int, **changes: Any) -> Network:
    """A layer of an op on rounded values, with parameters and options as they are usually given.

    Args:
        changes: of the layer or of the network, by the names of their attributes.
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
        gather: else its gradients are summed.
        first_rows: how many elements are waited for before the rest, of a gathered bucket.
    """

    elements: int
    gather: bool = False
    dtype: torch.dtype = torch.float32
    average: bool = False
    scale: float = 1.0
    first_rows: int = 0


@dataclass(frozen=True)
class BucketRun:
    """Buckets, several under way, which every rank waits for in an order of its own."""

    size: int
    buckets: tuple[Bucket, ...]
    seed: int = 0
    schedule: Schedule = Schedule()
    wide: bool = False
    scratch_bytes: int = 1 << 20
    last_first: bool = False
    lanes: int = LANES
    batched: bool = False
    check: Check = "first"
    rounded: bool = False


Case = Network | BucketRun
