"""Scales a launch down: the same kind of model and of parallelism, with small numbers.

It keeps the ratios that decide which code runs (query heads per key/value head, width of the MLP,
whether a dimension is parallel at all), and sizes that CommFuse can split: at least 32 rows per
rank and 64 bytes per row of every shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.option_words import Options

_OPTIONS = {
    **{kind: f"--{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert")},
    "context": "--context-parallel-size",
}
_HEAD = 16  # features per attention head
_ROWS = 32  # of the sequence, per rank
_EXPERTS = 4
_WIDTHS = ("--ffn-hidden-size", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size")
_MOST_DATA_PARALLEL = 2


@dataclass(frozen=True)
class RehearsedLayout:
    """Sizes of the parallel dimensions; expert parallelism is inside the others."""

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


def layout_of(options: Options, processes: int | None) -> RehearsedLayout:
    """The layout of a launch; the smallest one if the number of processes is not given."""
    base = RehearsedLayout(
        data=1, **{name: options.number(option, 1) for name, option in _OPTIONS.items()}
    )
    if processes is None:
        return replace(base, data=base.expert // math.gcd(base.expert, base.context))
    if processes % base.processes:
        raise UsageError(
            f"the launch starts {processes} processes, which is no multiple of TP {base.tensor} * "
            f"PP {base.pipeline} * CP {base.context} = {base.processes}"
        )
    return replace(base, data=processes // base.processes)


def scale_down(options: Options, layout: RehearsedLayout, limit: int) -> RehearsedLayout:
    """Change ``options`` to a small model on at most ``limit`` processes; returns the layout."""
    small = _fewer_processes(layout, limit)
    for name, option in _OPTIONS.items():
        _at_most(options, getattr(small, name), option)
    if small.context != layout.context and "--ulysses-degree-in-cp" in options:
        options.drop("--ulysses-degree-in-cp")
        options.set("--context-parallel-algo", "ulysses_cp_algo")
    _layers(options, small)
    _widths(options, small)
    # Ring attention with a causal mask gives each rank two pieces.
    length = _ROWS * small.tensor * small.context
    options.set("--seq-length", min(length, options.number("--seq-length", length)))
    _at_most(options, length, "--max-position-embeddings")
    _batches(options, layout, small)
    if options.text("--tokenizer-type") == "NullTokenizer":
        options.set("--make-vocab-size-divisible-by", 1)
    return small


def _fewer_processes(layout: RehearsedLayout, limit: int) -> RehearsedLayout:
    replicas = min(layout.data, _MOST_DATA_PARALLEL)
    # Without context parallelism, experts are distributed over replicas: some options need both.
    spread = layout.expert > 1 == layout.context
    small = replace(layout, data=min(replicas, limit) if spread else 1)
    while small.processes > limit:
        # Divide the largest dimension; of equal ones, the least important here.
        name = max(("pipeline", "context", "tensor"), key=lambda name: getattr(small, name))
        size = getattr(small, name)
        factor = next(n for n in range(2, size + 1) if size % n == 0)
        small = replace(small, **{name: size // factor})
    data = min(replicas, limit * small.data // small.processes)
    return replace(small, data=data, expert=math.gcd(layout.expert, small.context * data))


def _replace(options: Options, value: object, name: str) -> None:
    if name in options:
        options.set(name, value)


def _at_most(options: Options, most: int, *names: str) -> None:
    for name in names:
        _replace(options, min(most, options.number(name, -1)), name)


def _layers(options: Options, small: RehearsedLayout) -> None:
    options.drop(
        *("--num-layer-list", "--noop-layers", "--pipeline-model-parallel-layout"),
        *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
        why="it fits the old number of layers only",
    )
    virtual = "--num-layers-per-virtual-pipeline-stage"
    if small.pipeline == 1:
        options.drop(virtual, why="there is one stage")
    options.set("--num-layers", 2 * small.pipeline)
    recomputed = "--recompute-num-layers", "--recompute-activation-function-num-layers"
    _at_most(options, 2, *recomputed)
    _at_most(options, 1, virtual, "--first-k-dense-replace", "--mtp-num-layers")


def _widths(options: Options, small: RehearsedLayout) -> None:
    """Scale heads, the hidden size, and sizes with a ratio to it."""
    hidden_before = options.number("--hidden-size", 0)
    heads = groups = options.number("--num-attention-heads", 1)
    if "--group-query-attention" in options:
        groups = options.number("--num-query-groups", heads)
    # Ulysses distributes heads over TP * CP ranks.
    parallel = small.tensor * small.context
    fewer_groups = max(2 * parallel, 4) if groups == heads else min(groups, parallel)
    heads = heads // groups * fewer_groups
    hidden = heads * _HEAD
    _replace(options, fewer_groups, "--num-query-groups")
    options.set("--num-attention-heads", heads)
    options.set("--hidden-size", hidden)
    _replace(options, _HEAD, "--kv-channels")
    for name in ("--long-factor", "--short-factor"):  # of each pair of a head's features
        factors = (options.text(name) or "").split(",")[: _HEAD // 2]
        _replace(options, ",".join(factors), name)
    # Several experts per rank: MindSpeed does not wait for the probabilities of a single one.
    ranks = small.expert * (small.tensor if "--moe-tp-extend-ep" in options else 1)
    _at_most(options, max(_EXPERTS, 2 * ranks), "--num-experts")
    _at_most(options, 2, "--moe-router-topk")
    _at_most(options, 1, "--moe-router-num-groups", "--moe-router-group-topk")
    multiple = 32 * small.tensor
    for name in _WIDTHS:
        ratio_to_hidden = options.number(name, 0) / (hidden_before or hidden)
        _replace(options, max(1, round(ratio_to_hidden * hidden / multiple)) * multiple, name)


def _batches(options: Options, layout: RehearsedLayout, small: RehearsedLayout) -> None:
    micro = options.number("--micro-batch-size", 1)
    batches = options.number("--global-batch-size", micro * layout.data) // (micro * layout.data)
    micro = min(micro, 2)
    # Enough micro-batches that forwards and backwards form pairs on the first stage, too.
    several = 4 * small.pipeline if "--commfuse-overlap" in options else small.pipeline
    batches = max(1, min(batches, max(2, several)))
    options.set("--micro-batch-size", micro)
    _replace(options, micro * small.data * batches, "--global-batch-size")
