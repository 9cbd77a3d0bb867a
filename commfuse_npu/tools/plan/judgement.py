"""Decides from the options of a launch alone what CommFuse would do; no other tool does this.

At its start the launch decides again, from Megatron's arguments and modules
(``mindspeed_patches``), with the same tables: :mod:`commfuse_npu.refusals` and
:mod:`commfuse_npu.options`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from commfuse_npu.options import DEFAULTS, add_arguments, unknown_option
from commfuse_npu.plan import block_rows, min_rows_to_fuse
from commfuse_npu.plan.slots import paired_microbatches, slots
from commfuse_npu.refusals import REFUSALS_OF, Needs, Refusal, missing
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.linear_layers import (
    Judged,
    attention_obstacle,
    judge,
    sequence_parallel,
    size_of,
)
from commfuse_npu.tools.model_config import OptionParser

__all__ = ["Judgement", "Layout", "Overlap", "Refused", "fuse_options", "judge_launch",
           "model_chunks"]  # fmt: skip

_RIVALS = {
    *("--use-ascend-coc", "--use-ascend-mc2", "--moe-fb-overlap", "--schedules-method dualpipev"),
    *("--tp-2d", "--tp-comm-overlap", "--use-nanopipe"),
}
_USUAL_ALGORITHM = "megatron_cp_algo"
_BESIDE_OVERLAP = {
    "--use-ascend-coc": "its transfers are inside of CoC's operators",
    "--use-ascend-mc2": "its transfers are inside of MC2's kernels",
    "--moe-fb-overlap": "it overlaps the same forwards and backwards",
}
"""Flags of other overlaps, and why forward-backward overlap cannot run together with them."""


class Layout(NamedTuple):
    """The parallel sizes of a launch, and properties of its model.

    Attributes:
        algorithm: of context parallelism; empty without it.
        data: replicas; ``None`` if the launch does not give its number of processes.
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
    def of(cls, options: Options, processes: int | None) -> Layout:
        kinds = ("tensor-model", "pipeline-model", "context", "expert-model")
        tensor, pipeline, context, expert = (size_of(options, kind) for kind in kinds)
        replicas, remainder = divmod(processes or 0, tensor * pipeline * context)
        algorithm = options.text("--context-parallel-algo") or _USUAL_ALGORITHM
        return cls(
            *(tensor, pipeline, context, expert),
            algorithm if context > 1 else "",
            None if processes is None or remainder else replicas,
            sequence_parallel(options),
            experts=options.number("--num-experts", 0) > 0,
            mla="--multi-latent-attention" in options,
            lora="--lora-target-modules" in options,
        )

    def __str__(self) -> str:
        algorithm = f" ({self.algorithm})" if self.algorithm else ""
        parts = [f"TP {self.tensor}", f"PP {self.pipeline}", f"CP {self.context}{algorithm}"]
        parts += [f"EP {self.expert}"] * self.experts
        parts.append(f"DP {'unknown' if self.data is None else self.data}")
        parts += ["sequence parallel"] * self.sequence_parallel + ["experts"] * self.experts
        return ", ".join([*parts, *["MLA"] * self.mla, *["LoRA"] * self.lora])


class Refused(NamedTuple):
    """An option that excludes one of CommFuse's, with its value."""

    refusal: Refusal
    value: str

    def __str__(self) -> str:
        option = self.refusal.option.split()[0]
        return option if self.value == "given" else f"{option} {self.value}"


class Overlap(NamedTuple):
    """What ``--commfuse-fb-overlap`` would do.

    Attributes:
        transfers: whether there are transfers of tensor, expert or context parallelism.
        obstacle: why it would not run, or would pair less than half of a stage's micro-batches;
            empty if neither.
        without: the obstacle that remains without the flags of other overlaps.
        paired: the smallest share of a stage's forwards that run beside a backward; ``None`` if the
            number of micro-batches is not known.
    """

    transfers: bool
    obstacle: str
    without: str
    paired: float | None


class Judgement(NamedTuple):
    """What CommFuse would do in a launch.

    Attributes:
        layers: each kind of linear layer, and what would happen to it if nothing were refused.
        fused: ``full`` if every layer with a transfer in its forward can be fused.
        refused: why ``--use-commfuse`` alone is refused, by option.
        kind: the first that applies: LoRA, another overlap, other options (``else``), TP 1.
        excluding: options that exclude one of CommFuse's, by the name of the latter.
        lacks: for each option that needs ``--use-commfuse``, what the launch lacks, or empty.
        why_not: for each such option, why it would be refused, or empty.
        rows: of a block; 0 if not known.
        least: layers with fewer rows stay Megatron's on an NPU with a hardware description.
        short: whether its blocks have fewer rows.
        notes: further facts for the reader.
    """

    layout: Layout
    layers: Sequence[Judged]
    fused: Literal["full", "partial"]
    refused: Mapping[str, str]
    kind: Literal["LoRA", "TP 1", "another overlap", "else", ""]
    excluding: Mapping[str, Sequence[Refused]]
    lacks: Mapping[str, str]
    why_not: Mapping[str, str]
    overlap: Overlap
    rows: int
    least: int
    short: bool
    notes: Sequence[str]

    @property
    def excluded(self) -> Sequence[Refused]:
        """The options that exclude ``--use-commfuse``."""
        return self.excluding["--use-commfuse"]

    @property
    def verdict(self) -> str:
        return "refused" if self.refused else self.fused

    @property
    def data_parallel_alone(self) -> bool:
        """Whether ``--use-commfuse --commfuse-dp`` works at TP 1, without fused linear layers."""
        return self.kind == "TP 1" and not self.why_not["--commfuse-dp"]


def fuse_options(words: Sequence[str]) -> argparse.Namespace:
    """The CommFuse options of a command line.

    Raises:
        ConfigError: a value is unknown or out of range.
        UsageError: an option looks like CommFuse's but does not exist; the launch refuses it, too.
    """
    if why := unknown_option(words):
        raise UsageError(f"the launch is refused: {why}")
    parser = OptionParser()
    add_arguments(parser)
    return argparse.Namespace(**DEFAULTS | parser.given(words))


def _min_rows_to_fuse(fuse: argparse.Namespace, size: int, hidden: int) -> int:
    # An explicit number of chunks, or tuning, means that blocks of any length are fused.
    chosen = fuse.commfuse_chunks or fuse.commfuse_tuning == "on"
    return 0 if chosen else min_rows_to_fuse(size, hidden)


def judge_launch(options: Options, processes: int | None, fuse: argparse.Namespace) -> Judgement:
    """Judge a launch with the options from :func:`fuse_options`.

    Args:
        processes: of the launch; ``None`` if it does not give them.

    Raises:
        UsageError: a size is not a whole number.
    """
    layout, words = Layout.of(options, processes), options.words
    length = options.number("--seq-length", 0)
    needs = Needs(
        layout.tensor,
        layout.context,
        "--use-distributed-optimizer" in options,
        layout.algorithm or _USUAL_ALGORITHM,
        options.number("--num-attention-heads", 0) or None,
        length or None,
    )
    lacks = {
        "--commfuse-attention": attention_obstacle(options)
        if "proj" in fuse.commfuse_layers
        else "proj is not in the list of layers to fuse",
        "--commfuse-ulysses": missing("--commfuse-ulysses", needs),
        "--commfuse-dp": missing("--commfuse-dp", needs)
        or ("DP 1 transfers nothing" if layout.data == 1 == layout.context else ""),
    }
    excluding = {
        ours: [
            Refused(refusal, value)
            for refusal in refusals
            if (value := refusal.value_in(words)) is not None
        ]
        for ours, refusals in REFUSALS_OF.items()
    }
    excluded = excluding["--use-commfuse"]
    refused = {str(exclusion): exclusion.refusal.why for exclusion in excluded}
    kind: Literal["LoRA", "TP 1", "another overlap", "else", ""] = "else" if excluded else ""
    if layout.tensor == 1:
        reason = "a tensor-parallel group of one transfers nothing"
        kind, refused["--tensor-model-parallel-size 1"] = kind or "TP 1", reason
    if _RIVALS.intersection(refused):
        kind = "another overlap"
    if excluded and layout.lora:
        kind = "LoRA"
    layers, batch = judge(options, fuse.commfuse_layers), options.number("--micro-batch-size", 0)
    rows = block_rows(length, batch, layout.tensor, layout.context)
    least = _min_rows_to_fuse(fuse, layout.tensor, options.number("--hidden-size", 0))
    notes, spec = [], options.text("--spec") or ""
    short = layout.tensor > 1 and 0 < rows < least
    if short:
        notes.append(
            f"its blocks have {rows} rows, and with fewer than {least} Megatron's own order is "
            "faster (simulated): on an NPU that is described its layers are left to it, unless "
            "--commfuse-chunks 1 is given"
        )
    if spec and not spec.startswith("mindspeed_llm."):
        notes.append(f"--spec {spec} is not read: it is judged as Megatron's GPTModel")
    return Judgement(
        layout,
        layers,
        "partial" if any(layer.state == "left" for layer in layers) else "full",
        refused,
        kind,
        excluding,
        lacks,
        {name: _why_not(name, why, excluding[name]) for name, why in lacks.items()},
        _overlap(options, layout, excluding["--commfuse-fb-overlap"]),
        rows,
        least,
        short,
        notes,
    )


def _why_not(name: str, lacks: str, excluding: Sequence[Refused]) -> str:
    # The text starts with the option and ends with a remedy.
    lacks = lacks.removeprefix(name).partition("; ")[0].lstrip(": ")
    return "; ".join(filter(None, [lacks, *map(str, excluding)]))


def _overlap(options: Options, layout: Layout, excluding: Sequence[Refused]) -> Overlap:
    if max(layout.tensor, layout.context, layout.expert) == 1:
        nothing = "no tensor, expert or context parallelism, so nothing to hide"
        return Overlap(False, nothing, nothing, None)
    paired, unpaired = _paired(options, layout)
    refusals = (exclusion.refusal for exclusion in excluding)
    ours = (
        f"{refusal.option}: {refusal.why}"
        for refusal in refusals
        if refusal.option not in _BESIDE_OVERLAP
    )
    without = next(ours, unpaired)
    reasons = (f"{name}: {why}" for name, why in _BESIDE_OVERLAP.items() if name in options)
    return Overlap(True, next(reasons, without), without, paired)


def model_chunks(options: Options, stages: int) -> int:
    """Model chunks per pipeline stage; 1 without a virtual pipeline."""
    chunks = options.number("--num-virtual-stages-per-pipeline-rank", 0)
    each = options.number("--num-layers-per-virtual-pipeline-stage", 0)
    if each and not chunks:
        layers = options.number("--num-layers", 0)
        chunks, remainder = divmod(layers, stages * each)
        if remainder:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {each}: {layers} layers are not "
                f"divisible by it times {stages} stages; choose another"
            )
    return max(1, chunks)


def _paired(options: Options, layout: Layout) -> tuple[float | None, str]:
    """The smallest share of forwards that have a partner, and why it is too small, or empty."""
    stages, data = layout.pipeline, layout.data
    if data is None:
        return None, "it does not say how many processes it has"
    micro = options.number("--micro-batch-size", 1)
    batches = options.number("--global-batch-size", micro * data) // (micro * data)
    chunks = model_chunks(options, stages)
    if batches * chunks < 2:
        return 0.0, "one micro-batch has no partner"
    if chunks > 1 and batches % stages:
        return None, f"{batches} micro-batches are no multiple of {stages} stages"
    pairs = [paired_microbatches(slots(stages, s, chunks, batches)) for s in range(stages)]
    least = min(paired / total for paired, total in pairs)
    reason = f"{batches} micro-batches: {least:.0%} of a stage's have a partner"
    return least, reason if least < 0.5 else ""
