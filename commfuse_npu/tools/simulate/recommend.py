"""Finds the best layout and form for a model on a cluster.

Every layout that fits the model, the NPUs and their memory is simulated in every form at typical
figures.  The best are then simulated on all five machines of the hardware's ranges (see
:mod:`.timed`).  The number of machines on which the order is the same shows how reliable the
recommendation is.

A recommendation is printed as options of ``pretrain_gpt.py``, and written as a configuration that
the launch scripts read through ``CONFIG=FILE``.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.runtime.atomic_write import atomic_write
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import USABLE, footprint, limit
from commfuse_npu.tools.simulate.timed import Timed, timed
from commfuse_npu.tools.simulate.training import Layout, Training, training
from commfuse_npu.tools.simulate.variants import Variant, forms
from commfuse_npu.tools.terminal import tell

_CONTEXTS = (1, 2, 4, 8, 16)
_INTERLEAVED = (2, 4)
"""Chunks per pipeline stage to try, besides 1."""
_RANKED = 5
"""Number of layouts that are shown."""


class NoLayoutError(ValueError):
    """No layout fits; the message counts the reasons."""


class Fixed(NamedTuple):
    """Sizes that the user has fixed; ``None`` leaves one to the search."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    recompute: str | None = None


def recommend(
    model: ModelConfig,
    hardware: Hardware,
    npus: int,
    fixed: Fixed,
) -> tuple[list[Timed], str]:
    """Search for the best layout and form.

    Args:
        npus: number of NPUs; all are used.
        fixed: sizes that the user has fixed.

    Returns:
        The best form of each of the best layouts, and the best with and without CommFuse, shortest
        step first; and how many layouts fit, and why others do not.

    Raises:
        NoLayoutError: no layout fits.
        ValueError: the machine has fewer NPUs, or they are not whole hosts.
    """
    hardware.check(npus)
    host = hardware.npus_per_host
    if npus > host and npus % host:
        below = npus // host * host
        raise ValueError(
            f"--npus {npus} is more than a host of {host} and not whole hosts; choose {below} or "
            f"{below + host}"
        )
    machine = hardware.machine()
    most = limit(hardware)
    choices = [fixed.recompute == "full"] if fixed.recompute else [False, True]
    refused = Counter[str]()
    candidates: list[Timed] = []
    for layout in _layouts(model, hardware, npus, fixed):
        tell(f"TP {layout.tp}, CP {layout.cp}, PP {layout.pp}, DP {layout.dp}, chunks {layout.vpp}")
        found: list[Timed] = []
        reason = "more memory than an NPU has"
        try:
            for choice in choices:
                setup = training(model, layout, recomputes=choice)
                launched = [form for form in forms(machine, setup) if form.launched]
                fitting = [f for f in launched if footprint(setup, f, hardware).total <= most]
                found += [timed(setup, form, hardware, 1) for form in fitting]
                if fitting == launched:
                    break  # recomputation makes room; without that need it is never faster
        except ValueError as error:
            reason = str(error).splitlines()[0].split(";")[0]
        candidates += found
        if not found and layout.vpp == 1:
            refused[reason] += 1
    candidates.sort(key=lambda row: row.typical)
    by_layout: dict[Layout, Timed] = {}
    for row in candidates:
        # Layouts that differ only in their chunks are one.
        by_layout.setdefault(row.training.layout._replace(vpp=1), row)
    best = list(by_layout.values())
    counts = "; ".join(f"{count} x {reason}" for reason, count in refused.most_common(3))
    if not best:
        why = counts or "the fixed sizes do not divide them"
        raise NoLayoutError(
            f"no layout of {npus} NPUs fits {model.seq_length} tokens and a global batch of "
            f"{model.global_batch_size}: {why}; take another --npus, a shorter --sequence-length, "
            "another --micro-batch, or leave sizes open"
        )
    shown = [*best[:_RANKED], *{row.form.ours: row for row in reversed(candidates)}.values()]
    rows = [timed(row.training, row.form, hardware) for row in candidates if row in shown]
    fits = f"{len(best)} layouts fit {most / 2**30:.1f} GiB ({USABLE:.0%} of an NPU)"
    return rows, f"{fits}; not: {counts}" if counts else fits


def _layouts(model: ModelConfig, hardware: Hardware, npus: int, fixed: Fixed) -> Iterator[Layout]:
    """Every division of the NPUs; whether it fits the model is checked later.

    Interleaved pipelines are included if they divide layers and micro-batches.
    """
    tps = [fixed.tp] if fixed.tp else _divisors(min(npus, hardware.npus_per_node))
    cps = [fixed.cp] if fixed.cp else _CONTEXTS
    stages = model.pipeline_model_parallel_size
    pps = [fixed.pp] if fixed.pp else dict.fromkeys([*_divisors(model.num_layers), stages])
    for tp, cp, pp in product(tps, cps, pps):
        dp, remainder = divmod(npus, tp * cp * pp)
        if remainder:
            continue
        yield Layout(tp, cp, dp, pp)
        # Micro-batches pass through chunks ``pp`` at a time.
        even = pp != stages or model.num_layer_list is None
        if pp > 1 and even and model.global_batch_size // (model.micro_batch_size * dp) % pp == 0:
            for vpp in _INTERLEAVED:
                if model.num_layers % (pp * vpp) == 0:
                    yield Layout(tp, cp, dp, pp, vpp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# ------------------------------------------------------------------------ as options, as a file

_FIRST_LINE = "# Written by commfuse-npu plan"
_DECIDED = ("--num-layers-per-virtual-pipeline-stage", "--recompute-", "--overlap-")
"""Prefixes of options that a plan sets itself and therefore removes from the model's."""


def options(model: ModelConfig, plan: ModelConfig) -> list[str]:
    """What a plan decides, or has other than its model, as options of ``pretrain_gpt.py``."""
    sizes = "--use-distributed-optimizer", "--context-parallel-size", "1"
    before = Options(model.arguments())
    words = Options([*sizes, *plan.arguments(), *plan.commfuse_options])
    return [
        word
        for name in words.names
        if "parallel" in name
        or name.startswith((*_DECIDED, "--num-layer-list"))
        or name not in before
        or words.text(name) != before.text(name)
        for word in (name, *words.values(name))
    ]


def _without_key(training: Training) -> Iterator[str]:
    """Options for settings that :class:`ModelConfig` has no key for."""
    layout = training.layout
    if layout.dp * layout.cp > 1:
        # The simulation assumes these overlaps.
        yield from ("--overlap-grad-reduce", "--overlap-param-gather")
    if layout.vpp > 1:
        yield from (
            "--num-layers-per-virtual-pipeline-stage",
            f"{training.layers[0] // layout.vpp}",
        )
    if training.recomputes:
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform")
        yield from ("--recompute-num-layers", "1")


def planned(
    model: ModelConfig, hardware: Hardware, training: Training, form: Variant
) -> ModelConfig:
    """The model in the simulated layout, with options for settings that have no key."""
    npus = training.layout.npus
    kept = Options(model.pretrain_options)
    kept.drop(*(name for name in kept.names if name.startswith(_DECIDED)))
    per_node = min(npus, hardware.npus_per_host)
    flags = form.flags.split()
    plan = replace(
        training.model,
        npus_per_node=per_node,
        nnodes=npus // per_node,
        pretrain_options=(*kept.words, *_without_key(training), *([] if form.ours else flags)),
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


def write_plan(path: Path, plan: ModelConfig, row: Timed, hardware: Hardware) -> None:
    """Write a plan and what it was simulated with; an earlier one is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [
        f"{_FIRST_LINE} for {plan.world_size} NPUs of {hardware.name}:",
        f"# {row.name}, {row.typical:.3g} s a step. Simulated, not measured.",
        plan.as_yaml(),
    ]
    with atomic_write(path) as part:
        part.write_text("\n".join(lines), "utf-8")
