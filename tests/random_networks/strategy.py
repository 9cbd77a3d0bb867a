"""Hypothesis strategies for random cases.

A failing case shrinks toward the first alternative of each choice.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from commfuse_npu.plan import Schedule
from tests.attention_masks import MASKS
from tests.random_networks.case import (
    ATTENTION,
    FROM_SHARD,
    FROM_WHOLE,
    HEAD_FEATURES,
    LANES,
    OPS,
    Bucket,
    BucketRun,
    Case,
    Layer,
    Layout,
    Network,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYOUTS: tuple[Layout, ...] = ("plain", "transposed", "sliced", "offset")
_TENSOR_PARALLEL = (
    "all_gather_linear",
    "linear_reduce_scatter",
    "linear_all_reduce",
    "attention_linear_reduce_scatter",
)
_EXACT = {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
"""Integers up to this value are exact in the dtype."""


def cases(size: int) -> st.SearchStrategy[Case]:
    """Cases for a group of ``size`` ranks: buckets, each first op, and Megatron's pair of layers,
    the first of which gathers its input again in the backward of the second, are equally likely."""
    kinds = [_networks(size, op) for op in OPS]
    pairs = _networks(size, "all_gather_linear", "linear_reduce_scatter")
    return st.one_of(*kinds, pairs, _bucket_runs(size))


def _often(common: bool = False) -> st.SearchStrategy[bool]:
    """``common`` with probability 3/4."""
    return st.sampled_from((common, common, common, not common))


@st.composite
def _schedules(draw: st.DrawFn, size: int, lanes: int, linear: bool = False) -> Schedule:
    shape = draw(st.sampled_from(("shifted", "two_level", *(["collective"] if linear else []))))
    schedule = Schedule(
        lanes=draw(st.integers(1, lanes)),
        chunks=draw(st.one_of(st.integers(1, 3), st.integers(1, 8))),
    )
    if shape == "two_level":
        nodes = [n for n in range(1, size + 1) if size % n == 0]
        return replace(schedule, shape="two_level", node_size=draw(st.sampled_from(nodes)))
    if shape == "collective":
        return replace(schedule, shape=shape, lanes=1)
    return schedule if linear else replace(schedule, causal=draw(_often()))


@st.composite
def _layers(
    draw: st.DrawFn, op: str, size: int, lanes: int, dtype: torch.dtype, rounded: bool
) -> Layer:
    # The rounding of MKL depends on row addresses modulo 64 bytes and on small row counts.
    features = st.sampled_from((32, 64)) if rounded else st.integers(1, 12)
    layouts = st.sampled_from([layout for layout in _LAYOUTS if layout != "offset" or not rounded])
    layer = Layer(
        op,
        inputs=draw(features),
        outputs=draw(features),
        schedule=draw(_schedules(size, lanes, op in _TENSOR_PARALLEL)),
        x_layout=draw(layouts),
        grad_layout=draw(st.one_of(layouts, st.just("expanded"))),
        recompute=draw(st.sampled_from((*["no"] * 6, "reentrant", "non_reentrant"))),
    )
    if op in ATTENTION:
        keys = draw(st.sampled_from((1, 2)))
        # A reentrant checkpoint refuses outputs without gradients.
        some = [] if layer.recompute == "reentrant" else ["", "q", "k", "qv", "kv"]
        heads = st.sampled_from(["qkv"] * 6 + some)
        layer = replace(
            layer,
            inputs=(2 + 2 * keys) * HEAD_FEATURES,
            outputs=draw(st.sampled_from((32, 64))),
            keys=keys,
            mask=draw(st.sampled_from(("full", "causal", *MASKS))),
            scale=draw(st.sampled_from((None, None, 0.3))),
            trained=draw(heads),
        )
    rounds = rounded or op == "attention_linear_reduce_scatter"
    if rounds and layer.schedule.shape == "two_level":
        # A two-level schedule with several nodes adds in another order.
        layer = replace(layer, schedule=replace(layer.schedule, node_size=size))
    if op == "attention_all_to_all":
        return layer
    layer = replace(
        layer,
        bias=draw(st.sampled_from(("no", "trained", "frozen"))),
        weight_grad=draw(_often(True)),
        weight_layout="plain" if rounded else draw(layouts),
    )
    if dtype != torch.float32:
        layer = replace(layer, wide=draw(st.booleans()))
    if op in _TENSOR_PARALLEL:
        least = draw(st.sampled_from((None, None, 1)))
        layer = replace(layer, collectives_from=least)
    if layer.weight_grad and draw(_often()):
        main_grad = draw(st.sampled_from(_DTYPES))
        layer = replace(layer, main_grad=main_grad, flag=draw(st.booleans()))
    return layer


def _is_whole(whole: bool, layer: Layer) -> bool:
    """Whether a rank holds all rows after ``layer``."""
    return whole if layer.op == "linear_all_reduce" else layer.op in FROM_SHARD


@st.composite
def _networks(draw: st.DrawFn, size: int, *first: str) -> Network:
    """Layers of the ops ``first``, in a chain if there are two, and up to two more."""
    dtype = draw(st.sampled_from(_DTYPES))
    lanes = draw(st.integers(1, LANES))
    whole = first[0] not in FROM_SHARD
    # One rank does not cut the rows, and MKL rounds few rows differently from many.
    rounded = size > 1 and draw(st.booleans())
    branches = len(first) == 1 and draw(_often())
    layers = [draw(_layers(op, size, lanes, dtype, rounded)) for op in first]
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        if not branches:
            whole = _is_whole(whole, layers[-1])
        op = draw(st.sampled_from(FROM_WHOLE if whole else FROM_SHARD))
        layers.append(draw(_layers(op, size, lanes, dtype, rounded)))
    small = st.sampled_from((4, 6)) if rounded else st.integers(1, 6)
    rows = draw(st.one_of(small, st.integers(4 if rounded else 1, 40), st.sampled_from((48, 64))))
    batch = draw(st.sampled_from((None, 1, 2, 3)))
    if draw(st.integers(0, 19)) == 19:
        rows, batch = draw(st.sampled_from(((0, batch), (rows, 0))))
    if batch is None and any(layer.op in ATTENTION for layer in layers):
        batch = 1
    micro_batches = draw(st.sampled_from((1, 1, 2)))
    # A weight gradient sums one number per row.
    limit = min(_EXACT[kind] for layer in layers for kind in (dtype, layer.main_grad or dtype)) // (
        4 * size * micro_batches * max(1, batch or 1)
    )
    return Network(
        size,
        tuple(layers),
        seed=draw(st.integers(0, 1 << 16)),
        dtype=dtype,
        rows=rows if rounded else min(rows, limit),
        batch=batch,
        x_grad=draw(_often(True)),
        branches=branches,
        micro_batches=micro_batches,
        last_first=draw(st.booleans()),
        gradients=draw(st.sampled_from((*[True] * 9, False))),
        lanes=lanes,
        rounded=rounded,
    )


@st.composite
def _bucket_runs(draw: st.DrawFn, size: int) -> BucketRun:
    lanes = draw(st.integers(1, LANES))
    wide, rounded = draw(_often()), draw(st.booleans())
    schedule = draw(_schedules(size, lanes))
    if rounded and schedule.shape == "two_level":
        schedule = replace(schedule, node_size=size)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    buckets = []
    for _ in range(draw(st.integers(1, 5))):
        elements = draw(st.one_of(st.integers(0, 9), st.integers(0, 200)))
        elements += rounded and elements % 2  # else gloo adds some in the order of another block
        gather = draw(st.booleans())
        if gather:
            dtype = draw(st.sampled_from((*dtypes, torch.int64)))
            buckets.append(Bucket(elements, gather, dtype))
        else:
            average, scale = draw(st.booleans()), draw(st.sampled_from((1.0, 0.5, 2.0, 0.3)))
            scale = scale if rounded else max(0.5, scale)
            buckets.append(Bucket(elements, gather, draw(st.sampled_from(dtypes)), average, scale))
    return BucketRun(
        size,
        tuple(buckets),
        seed=draw(st.integers(0, 1 << 16)),
        schedule=schedule,
        wide=wide,
        scratch_bytes=draw(st.sampled_from((1 << 20, 0, 100))),
        lanes=lanes,
        rounded=rounded,
    )
