"""Scales a launch down: the same kind of model and of parallelism, with small numbers.

Kept are the ratios that decide which code runs (query heads per key/value head, width of the MLP,
whether a dimension is parallel at all), and sizes that CommFuse can cut: at least 32 rows per rank
and 64 bytes per row of every shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options

__all__ = ["Layout", "layout_of", "scale_down"]

_TP, _PP, _CP, _EP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
)
_HEAD = 16  # features per attention head
_ROWS = 32  # of the sequence, per rank
_EXPERTS = 4
_MOST_DATA_PARALLEL = 2


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; expert parallelism lies inside of the others."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int = 1

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        return (
            f"TP {self.tensor}, PP {self.pipeline}, CP {self.context}, DP {self.data}, "
            f"EP {self.expert}: {self.processes} processes"
        )


def layout_of(options: Options, processes: int | None) -> Layout:
    """The layout of a launch; without a number of processes, the smallest.

    Raises:
        UsageError: the number is no multiple of TP * PP * CP.
    """
    tensor, pipeline, context, expert = (options.number(n, 1) for n in (_TP, _PP, _CP, _EP))
    model = tensor * pipeline * context
    if processes is None:
        processes = model * (expert // math.gcd(expert, context))
    if processes % model:
        raise UsageError(
            f"the launch starts {processes} processes, which is no multiple of TP {tensor} * PP "
            f"{pipeline} * CP {context} = {model}"
        )
    return Layout(tensor, pipeline, context, processes // model, expert)


def scale_down(options: Options, layout: Layout, limit: int) -> Layout:
    """Change ``options`` to a small model in at most ``limit`` processes; gives their layout."""
    small = _fewer_processes(layout, limit)
    for name, size in (
        (_TP, small.tensor),
        (_PP, small.pipeline),
        (_CP, small.context),
        (_EP, small.expert),
    ):
        if name in options:
            options.set(name, size)
    if small.context != layout.context and "--ulysses-degree-in-cp" in options:
        options.drop("--ulysses-degree-in-cp")
        options.set("--context-parallel-algo", "ulysses_cp_algo")
    _layers(options, small)
    hidden_before = options.number("--hidden-size", 0)
    hidden = _heads(options, small)
    _widths(options, small, hidden_before, hidden)
    _experts(options, small, hidden_before, hidden)
    _sequence(options, small)
    _batches(options, layout, small)
    if options.text("--tokenizer-type") == "NullTokenizer":
        options.set("--make-vocab-size-divisible-by", 1)
    return small


def _fewer_processes(layout: Layout, limit: int) -> Layout:
    replicas = min(layout.data, _MOST_DATA_PARALLEL)
    # Without context parallelism experts are spread over replicas: some options need both.
    spread = layout.expert > 1 == layout.context
    small = replace(layout, data=min(replicas, limit) if spread else 1)
    while small.processes > limit:
        # The largest dimension loses a factor; of equal ones the one that matters least here.
        name, size = max(
            (("pipeline", small.pipeline), ("context", small.context), ("tensor", small.tensor)),
            key=lambda item: item[1],
        )
        factor = next(n for n in range(2, size + 1) if size % n == 0)
        small = replace(small, **{name: size // factor})
    data = min(replicas, limit * small.data // small.processes)
    return replace(small, data=data, expert=math.gcd(layout.expert, small.context * data))


def _layers(options: Options, small: Layout) -> None:
    options.drop(
        *("--num-layer-list", "--noop-layers", "--pipeline-model-parallel-layout"),
        *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
        why="it fits the old number of layers only",
    )
    per_stage = min(2, max(1, options.number("--num-layers", 2)))
    if "--num-layers-per-virtual-pipeline-stage" in options:
        if small.pipeline > 1:
            options.set("--num-layers-per-virtual-pipeline-stage", 1)
            per_stage = 2
        else:
            options.drop("--num-layers-per-virtual-pipeline-stage", why="there is one stage")
    options.set("--num-layers", per_stage * small.pipeline)
    for name, most in (
        ("--recompute-num-layers", per_stage),
        ("--recompute-activation-function-num-layers", per_stage),
        ("--first-k-dense-replace", 1),
        ("--mtp-num-layers", 1),
    ):
        if name in options:
            options.set(name, min(most, options.number(name, 1)))


def _heads(options: Options, small: Layout) -> int:
    """Set the heads and the hidden size, which is returned."""
    heads = options.number("--num-attention-heads", 1)
    groups = options.number("--num-query-groups", heads)
    if "--group-query-attention" not in options:
        groups = heads
    # Ulysses spreads heads over TP * CP ranks.
    parallel = small.tensor * small.context
    if groups == heads:
        heads = groups = max(2 * parallel, 4)
    else:
        ratio = heads // groups
        groups = parallel if groups >= parallel else groups
        heads = ratio * groups
        options.set("--num-query-groups", groups)
    options.set("--num-attention-heads", heads)
    if "--kv-channels" in options:
        options.set("--kv-channels", _HEAD)
    for name in ("--long-factor", "--short-factor"):  # of each pair of a head's features
        if name in options:
            factors = str(options.text(name)).split(",")[: _HEAD // 2]
            options.set(name, ",".join(factors))
    hidden = heads * _HEAD
    options.set("--hidden-size", hidden)
    return hidden


def _like_hidden(old: int, hidden_before: int, hidden: int, multiple: int) -> int:
    """A width with the old ratio to the hidden size, rounded to a multiple."""
    ratio = old / hidden_before if hidden_before else 1.0
    return max(1, round(ratio * hidden / multiple)) * multiple


def _widths(options: Options, small: Layout, hidden_before: int, hidden: int) -> None:
    name = "--ffn-hidden-size"
    if name in options:
        old = options.number(name, hidden_before)
        options.set(name, _like_hidden(old, hidden_before, hidden, 32 * small.tensor))


def _experts(options: Options, small: Layout, hidden_before: int, hidden: int) -> None:
    if "--num-experts" not in options:
        return
    # Several on each rank: MindSpeed does not wait for the probabilities of a single one.
    ranks = small.expert * (small.tensor if "--moe-tp-extend-ep" in options else 1)
    experts = max(_EXPERTS, 2 * ranks)
    options.set("--num-experts", min(experts, options.number("--num-experts", experts)))
    if "--moe-router-topk" in options:
        options.set("--moe-router-topk", min(2, options.number("--moe-router-topk", 2)))
    for name in ("--moe-router-num-groups", "--moe-router-group-topk"):
        if name in options:
            options.set(name, 1)
    for name in ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"):
        if name in options:
            old = options.number(name, hidden_before)
            options.set(name, _like_hidden(old, hidden_before, hidden, 32 * small.tensor))


def _sequence(options: Options, small: Layout) -> None:
    # Ring attention with a causal mask gives each rank two pieces.
    length = _ROWS * small.tensor * small.context
    length = min(length, options.number("--seq-length", length))
    options.set("--seq-length", length)
    positions = options.number("--max-position-embeddings", length)
    options.set("--max-position-embeddings", min(positions, length))


def _batches(options: Options, layout: Layout, small: Layout) -> None:
    micro = options.number("--micro-batch-size", 1)
    batches = options.number("--global-batch-size", micro * layout.data) // (micro * layout.data)
    micro = min(micro, 2)
    # So many that forwards and backwards pair on the first stage, too.
    several = 4 * small.pipeline if "--commfuse-fb-overlap" in options else small.pipeline
    batches = max(1, min(batches, max(2, several)))
    options.set("--micro-batch-size", micro)
    if "--global-batch-size" in options:
        options.set("--global-batch-size", micro * small.data * batches)
