"""A simulated training as options of ``pretrain_gpt.py``, and as a configuration for launchers.

The launch scripts read a written plan through ``CONFIG=FILE``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.runtime.atomic_write import atomic_write
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.recommend import Candidate
from commfuse_npu.tools.simulate.step import Training
from commfuse_npu.tools.simulate.variants import COC, COC_FUSED, FB_OVERLAP, MC2, MEGATRON, Variant

__all__ = ["FORMS", "check_target", "launching", "options", "planned", "write_plan"]

FORMS = {
    MEGATRON: ("Megatron's order", ""),
    **{
        form: (f"CoC in {form.way} slices", f"--use-ascend-coc --coc-parallel-num {form.way}")
        for form in COC
    },
    COC_FUSED: ("CoC's kernel", "--use-ascend-coc --coc-fused-kernel"),
    MC2: ("MC2", "--use-ascend-mc2"),
    FB_OVERLAP: ("forward-backward overlap", "--commfuse-fb-overlap"),
}
"""The forms besides fused layers that can be launched: description and flags."""

_FIRST_LINE = "# Written by commfuse-npu plan"
_DECIDED = ("--num-layers-per-virtual-pipeline-stage", "--recompute-", "--overlap-")
"""Prefixes of options that a plan sets itself and therefore removes from the model's."""


def options(model: ModelConfig, chosen: Candidate) -> list[str]:
    """Layout, recomputation and schedule, as options of ``pretrain_gpt.py``."""
    training, layout = chosen.training, chosen.training.layout
    words = [
        *("--tensor-model-parallel-size", str(layout.tp)),
        *("--pipeline-model-parallel-size", str(layout.pp)),
        *("--context-parallel-size", str(layout.cp)),
        *(("--context-parallel-algo", model.context_parallel_algo) if layout.cp > 1 else ()),
        *(("--sequence-parallel",) if layout.tp > 1 else ()),
        "--use-distributed-optimizer",
    ]
    # Values other than the layout that differ from the model's description.
    for name in ("seq_length", "max_position_embeddings", "micro_batch_size", "global_batch_size"):
        if (value := getattr(training.model, name)) != getattr(model, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += _without_key(training)
    if len(set(training.layers)) > 1:
        words += ["--num-layer-list", ",".join(map(str, training.layers))]
    return [*words, *launching(chosen.variant, training)]


def _without_key(training: Training) -> Iterator[str]:
    """Options for settings that :class:`ModelConfig` has no key for."""
    layout = training.layout
    if layout.dp * layout.cp > 1:
        # The simulation assumes these overlaps.
        yield from ("--overlap-grad-reduce", "--overlap-param-gather")
    if layout.vpp > 1:
        each = training.layers[0] // layout.vpp
        yield from ("--num-layers-per-virtual-pipeline-stage", str(each))
    if training.recomputes:
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform")
        yield from ("--recompute-num-layers", "1")


def launching(variant: Variant, training: Training) -> Iterator[str]:
    """The ``pretrain_gpt.py`` options of a variant; none for Megatron's own order."""
    schedule, layout = variant.schedule, training.layout
    _, flags = FORMS.get(variant, ("", ""))
    yield from flags.split()
    if variant == FB_OVERLAP and layout.pp > 1 and layout.vpp == 1:
        yield "--commfuse-fb-overlap-memory"
    if schedule is None:
        return
    yield "--use-commfuse"
    if schedule.shape != "collective":  # what a launch uses unless lanes are given
        yield from ("--commfuse-lanes", str(schedule.lanes))
    if variant.tuned:
        yield from ("--commfuse-tuning", "on")
    else:
        yield from ("--commfuse-chunks", str(schedule.chunks))
    if schedule.taper != 1:
        yield from ("--commfuse-taper", f"{schedule.taper:g}")
    if variant.attention:
        yield "--commfuse-attention"
    if training.fuse_ulysses and layout.cp > 1:
        yield "--commfuse-ulysses"
    if variant.wgrad != "whole":
        yield from ("--commfuse-wgrad", variant.wgrad)
    if variant.sums == "once":
        yield from ("--commfuse-reduce-dtype", "float32")


def planned(model: ModelConfig, hardware: Hardware, chosen: Candidate) -> ModelConfig:
    """The model in the simulated layout, with options for settings that have no key."""
    training, npus = chosen.training, chosen.training.layout.npus
    words: list[str] = []
    decided = False
    for word in model.pretrain_options:
        decided = word.startswith(_DECIDED) if word.startswith("--") else decided
        words += [] if decided else [word]
    per_node = min(npus, hardware.npus_per_host)
    ours = launching(chosen.variant, training) if chosen.variant.ours else ()
    flags = () if chosen.variant.ours else launching(chosen.variant, training)
    plan = replace(
        training.model,
        npus_per_node=per_node,
        nnodes=npus // per_node,
        pretrain_options=(*words, *_without_key(training), *flags),
        commfuse_options=tuple(ours),
    )
    plan.validate()
    return plan


def check_target(path: Path) -> None:
    """Refuse to overwrite any file except an earlier plan.

    Raises:
        ValueError: the file exists and is not a plan.
        OSError: it cannot be read.
    """
    if path.exists() and not path.read_text("utf-8", "replace").startswith(_FIRST_LINE):
        raise ValueError(f"--write {path}: there is such a file, and not of a plan; name another")


def write_plan(path: Path, model: ModelConfig, hardware: Hardware, chosen: Candidate) -> None:
    """Write a candidate as a model configuration; an earlier plan is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    tp, cp, dp, pp, _ = layout = chosen.training.layout
    lines = [
        f"{_FIRST_LINE} for {layout.npus} NPUs of {hardware.name}:",
        f"# TP {tp} x PP {pp} x CP {cp} x DP {dp}, {chosen.variant.name}, "
        f"{chosen.seconds:.3g} s a step. Simulated, not measured.",
        planned(model, hardware, chosen).as_yaml(),
    ]
    with atomic_write(path) as part:
        part.write_text("\n".join(lines), "utf-8")
