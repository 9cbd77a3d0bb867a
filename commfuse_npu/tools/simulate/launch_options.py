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
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import COC, COC_FUSED, FB_OVERLAP, MC2, MEGATRON, Variant

__all__ = ["FORMS", "check_target", "launching", "options", "planned", "write_plan"]

FORMS = {
    form: (title, form.flags or "")
    for form, title in (
        (MEGATRON, "Megatron's order"),
        *((form, f"CoC in {form.way} slices") for form in COC),
        (COC_FUSED, "CoC's kernel"),
        (MC2, "MC2"),
        (FB_OVERLAP, "forward-backward overlap"),
    )
}
"""The forms besides fused layers that can be launched: description and flags."""

_FIRST_LINE = "# Written by commfuse-npu plan"
_DECIDED = ("--num-layers-per-virtual-pipeline-stage", "--recompute-", "--overlap-")
"""Prefixes of options that a plan sets itself and therefore removes from the model's."""


def options(model: ModelConfig, training: Training, form: Variant) -> list[str]:
    """Layout, recomputation and form, as options of ``pretrain_gpt.py``."""
    layout = training.layout
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
    return [*words, *launching(form, training)]


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


def launching(form: Variant, training: Training) -> list[str]:
    """The ``pretrain_gpt.py`` options of a form; none for Megatron's own order."""
    words, layout = (form.flags or "").split(), training.layout
    if form == FB_OVERLAP and layout.pp > 1 and layout.vpp == 1:
        words.append("--commfuse-fb-overlap-memory")
    return words


def planned(
    model: ModelConfig, hardware: Hardware, training: Training, form: Variant
) -> ModelConfig:
    """The model in the simulated layout, with options for settings that have no key."""
    npus = training.layout.npus
    words: list[str] = []
    decided = False
    for word in model.pretrain_options:
        decided = word.startswith(_DECIDED) if word.startswith("--") else decided
        words += [] if decided else [word]
    per_node = min(npus, hardware.npus_per_host)
    flags = launching(form, training)
    plan = replace(
        training.model,
        npus_per_node=per_node,
        nnodes=npus // per_node,
        pretrain_options=(*words, *_without_key(training), *([] if form.ours else flags)),
        commfuse_options=tuple(flags if form.ours else ()),
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


def write_plan(
    path: Path,
    model: ModelConfig,
    hardware: Hardware,
    training: Training,
    form: Variant,
    seconds: float,
) -> None:
    """Write a training in a form as a model configuration; an earlier plan is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    tp, cp, dp, pp, _ = layout = training.layout
    lines = [
        f"{_FIRST_LINE} for {layout.npus} NPUs of {hardware.name}:",
        f"# TP {tp} x PP {pp} x CP {cp} x DP {dp}, {form.name}, "
        f"{seconds:.3g} s a step. Simulated, not measured.",
        planned(model, hardware, training, form).as_yaml(),
    ]
    with atomic_write(path) as part:
        part.write_text("\n".join(lines), "utf-8")
