"""What ``--use-commfuse`` would do in a launch, by the tables of refusals and of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from commfuse_npu.plan import block_rows
from commfuse_npu.tools.coverage.overlap import Overlapped, judge_overlap
from commfuse_npu.tools.doctor.fuse_options import FuseOptions, min_rows_of
from commfuse_npu.tools.launch_script.launch import Launch
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.linear_layers import (
    Judged,
    attention_obstacle,
    judge,
    sequence_parallel,
    size_of,
)
from commfuse_npu.tools.refusals import (
    ATTENTION_REFUSALS,
    DATA_PARALLEL_REFUSALS,
    FLOW_REFUSALS,
    REFUSALS,
    ULYSSES_REFUSALS,
    Refusal,
    data_parallel_obstacle,
    flow_obstacle,
    ulysses_obstacle,
)

__all__ = ["TENSOR_PARALLEL_1", "Coverage", "Kind", "Layout", "cover"]

Word = Literal["full", "partial", "refused"]
Kind = Literal["LoRA", "TP 1", "another overlap", "else", ""]

_OVERLAPS = (
    *("--use-ascend-coc", "--use-ascend-mc2", "--moe-fb-overlap", "--schedules-method dualpipev"),
    *("--tp-2d", "--tp-comm-overlap", "--use-nanopipe"),
)
TENSOR_PARALLEL_1 = "--tensor-model-parallel-size 1"
"""What ``--use-commfuse`` by itself is refused with, besides other options."""

_USUAL_ALGORITHM = "megatron_cp_algo"


@dataclass(frozen=True)
class Layout:
    """How a launch is laid out.

    Attributes:
        tensor, pipeline, context, expert: sizes of the parallel groups.
        algorithm: of context parallelism, where there is any.
        data: replicas; ``None`` if the launch does not say how many processes it has.
        sequence_parallel: whether activations are split along the sequence.
        experts, mla, lora: whether it has a mixture of experts, multi-latent attention, LoRA.
    """

    tensor: int
    pipeline: int
    context: int
    expert: int
    algorithm: str
    data: int | None
    sequence_parallel: bool
    experts: bool
    mla: bool
    lora: bool

    @classmethod
    def of(cls, launch: Launch) -> Layout:
        words = launch.options.words
        kinds = ("tensor-model", "pipeline-model", "context", "expert-model")
        tensor, pipeline, context, expert = (_size(launch.options, kind) for kind in kinds)
        ranks = tensor * pipeline * context
        whole = launch.processes is not None and launch.processes % ranks == 0
        return cls(
            *(tensor, pipeline, context, expert),
            (launch.options.text("--context-parallel-algo") or _USUAL_ALGORITHM)
            if context > 1
            else "",
            launch.processes // ranks if launch.processes is not None and whole else None,
            sequence_parallel(words),
            experts=launch.options.number("--num-experts", 0) > 0,
            mla="--multi-latent-attention" in launch.options,
            lora="--lora-target-modules" in launch.options,
        )

    def __str__(self) -> str:
        algorithm = f" ({self.algorithm})" if self.algorithm else ""
        named = (
            ("sequence parallel", self.sequence_parallel),
            ("experts", self.experts),
            ("MLA", self.mla),
            ("LoRA", self.lora),
        )
        return ", ".join(
            [
                f"TP {self.tensor}, PP {self.pipeline}, CP {self.context}{algorithm}",
                *([f"EP {self.expert}"] if self.experts else []),
                f"DP {'unknown' if self.data is None else self.data}",
                *(name for name, given in named if given),
            ]
        )


@dataclass(frozen=True)
class Coverage:
    """What ``--use-commfuse`` would do in a launch.

    Attributes:
        script: which starts it, below the folder that was asked about.
        layout: of its ranks.
        verdict: ``full``: each tensor-parallel linear layer that has a transfer in its forward is
            fused.  ``partial``: some are.  ``refused``: the launch would end at its start.
        layers: what becomes of each kind of linear layer, or would without what is refused.
        refused: an option and why it excludes, per reason.
        kind: of the refusal: the first that is so of LoRA, another overlap, another option
            (``else``), and TP 1.
        without: the verdict without the options in ``refused``; empty if nothing is, or at TP 1.
        flags: CommFuse's other options, each with why it would do nothing or be refused; empty if
            it would be taken, where ``--use-commfuse`` is.
        short: blocks are so short that the feature leaves them to Megatron by default, though they
            can be fused.
        overlap: what forward-backward overlap would do.
        notes: what else a reader should know.
    """

    script: str
    layout: Layout
    verdict: Word
    layers: Sequence[Judged]
    refused: dict[str, str]
    kind: Kind
    without: str
    flags: dict[str, str]
    short: bool
    overlap: Overlapped
    notes: Sequence[str]

    @property
    def data_parallel_alone(self) -> bool:
        """Whether at TP 1 ``--use-commfuse --commfuse-dp`` would be taken, with no linear layer."""
        return not self.excluded and self.layout.tensor == 1 and not self.flags["--commfuse-dp"]

    @property
    def excluded(self) -> bool:
        """Whether options exclude ``--use-commfuse``, besides TP 1."""
        return not set(self.refused) <= {TENSOR_PARALLEL_1}


def cover(script: str, launch: Launch, chunks: int) -> Coverage:
    """Judge a launch.

    Args:
        script: which starts it.
        launch: what it starts.
        chunks: of ``--commfuse-flow``.

    Raises:
        UsageError: a size is no whole number.
        ConfigError: an option of CommFuse that the launch has makes no sense.
    """
    words, layout = launch.options.words, Layout.of(launch)
    fuse = FuseOptions.from_options(words)
    layers = judge(words, fuse.layers)
    excluded = _refused(words, REFUSALS)
    refused = dict(excluded)
    if layout.tensor == 1:
        alone = "a tensor-parallel group of one transfers nothing"
        refused[TENSOR_PARALLEL_1] = alone
    short = _short_blocks(launch, layout, fuse)
    whole: Word = "partial" if any(one.state == "left" for one in layers) else "full"
    return Coverage(
        script,
        layout,
        "refused" if refused else whole,
        layers,
        refused,
        _kind(layout, refused),
        f"{whole} without {' '.join(excluded)}" if excluded and layout.tensor > 1 else "",
        _flags(launch, layout, fuse, chunks),
        bool(short),
        judge_overlap(launch, layout.data, max(layout.tensor, layout.context, layout.expert) > 1),
        tuple(filter(None, (short, _unread_model(launch)))),
    )


def _size(options: Options, kind: str) -> int:
    options.number(f"--{kind}-parallel-size", 1)  # It says what is no number.
    return size_of(options.words, kind)


def _refused(words: Sequence[str], refusals: Sequence[Refusal]) -> dict[str, str]:
    """Of the refusals that apply: the option as it is given, and why it excludes."""
    found = {}
    for refusal in refusals:
        value = refusal.value_in(words)
        if value is not None:
            option = refusal.option.split()[0]
            found[option if value == "given" else f"{option} {value}"] = refusal.why
    return found


def _kind(layout: Layout, refused: dict[str, str]) -> Kind:
    if not refused:
        return ""
    if layout.lora:
        return "LoRA"
    if set(refused).intersection(_OVERLAPS):
        return "another overlap"
    return "TP 1" if list(refused) == [TENSOR_PARALLEL_1] else "else"


def _flags(launch: Launch, layout: Layout, fuse: FuseOptions, chunks: int) -> dict[str, str]:
    """CommFuse's other options, each with why it would do nothing or be refused."""
    words, options = launch.options.words, launch.options
    names = "--seq-length", "--num-attention-heads"
    length, heads = (options.number(name, 0) or None for name in names)
    algorithm = layout.algorithm or _USUAL_ALGORITHM
    unchosen = "" if "proj" in fuse.layers else "proj is not in the list of layers to fuse"
    obstacles = {
        "--commfuse-attention": (ATTENTION_REFUSALS, unchosen or attention_obstacle(words)),
        f"--commfuse-flow {chunks}": (
            FLOW_REFUSALS,
            flow_obstacle(chunks, layout.tensor, layout.sequence_parallel, length),
        ),
        "--commfuse-ulysses": (
            ULYSSES_REFUSALS,
            ulysses_obstacle(layout.context, layout.tensor, algorithm, heads, length),
        ),
        "--commfuse-dp": (
            DATA_PARALLEL_REFUSALS,
            data_parallel_obstacle("--use-distributed-optimizer" in options)
            or ("DP 1 transfers nothing" if layout.data == 1 == layout.context else ""),
        ),
    }
    return {
        # The layout's begin with the option and end with a way out.
        flag: "; ".join(
            filter(
                None,
                [
                    why.removeprefix(flag).partition("; ")[0].lstrip(": "),
                    *_refused(words, refusals),
                ],
            )
        )
        for flag, (refusals, why) in obstacles.items()
    }


def _short_blocks(launch: Launch, layout: Layout, fuse: FuseOptions) -> str:
    """What is to be said of blocks whose layers the feature leaves to Megatron; empty of others."""
    length, batch = (launch.options.number(f"--{name}", 0) for name in _OF_A_BLOCK)
    rows = block_rows(length, batch, layout.tensor, layout.context)
    limit = min_rows_of(layout.tensor, launch.options.number("--hidden-size", 0), fuse)
    if layout.tensor == 1 or not rows or rows >= limit:
        return ""
    return (
        f"its blocks have {rows} rows, and with fewer than {limit} Megatron's own order is faster "
        "(simulated): on an NPU that is described its layers are left to it, unless "
        "--commfuse-min-rows 0 is given"
    )


def _unread_model(launch: Launch) -> str:
    spec = launch.options.text("--spec") or ""
    if not spec or spec.startswith("mindspeed_llm."):
        return ""
    return f"--spec {spec} is not read: it is judged as Megatron's GPTModel"


_OF_A_BLOCK = ("seq-length", "micro-batch-size")
