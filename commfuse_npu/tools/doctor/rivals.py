"""What the simulator says is faster than a launch's fused layers, and how that is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware, described
from commfuse_npu.hardware.machine import covering_outputs
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, training
from commfuse_npu.tools.simulate.variants import REFERENCE, TURNS, Variant, fused, variants

__all__ = ["FLAGS", "check_rivals", "in_plain_pipeline", "layer_seconds", "not_simulated"]

_about = partial(Finding, "launch", "rivals")

FLAGS = {
    "megatron": ("Megatron's own order", ""),
    **{
        f"coc-{k}": (f"CoC in {k} slices", f"--use-ascend-coc --coc-parallel-num {k}")
        for k in (2, 4, 8)
    },
    "coc-fused": ("CoC as a kernel", "--use-ascend-coc --coc-fused-kernel"),
    "mc2": ("MC2", "--use-ascend-mc2"),
    TURNS.name: ("forward-backward overlap", "--commfuse-fb-overlap"),
}
"""By name of the variant: what it is, and the flags that a launch takes for it."""


def not_simulated(launch: Launch, npus_per_node: int) -> str:
    """Why the layers of a launch are not simulated; empty if they are."""
    config, layout = launch.config, launch.judged.layout
    if layout.tensor == 1:
        return "TP 1: its linear layers transfer nothing"
    if layout.experts or layout.mla:
        return "layers with experts or latent attention are not simulated"
    if not config.uses_sequence_parallel:
        return "layers without sequence parallelism are not simulated"
    if min(npus_per_node, config.npus_per_node) < layout.tensor:
        return f"a group of {layout.tensor} spans nodes of {npus_per_node} NPUs"
    return ""


def layer_seconds(launch: Launch, hardware: Hardware, schedule: Schedule) -> dict[str, float]:
    """Seconds of one layer of a launch, forward and backward, at typical figures.

    With full recomputation the forward counts twice.

    Returns:
        by name of the variant: :data:`FLAGS`, each kind's fastest, ``p2p`` with blocking
        collectives, and ``commfuse`` as ``--use-commfuse`` would run it.
    """
    figures, config = hardware.machine(), launch.config
    tp = config.tensor_model_parallel_size
    sequence = config.seq_length // config.context_parallel_size
    again = launch.options.text("--recompute-granularity") == "full"
    options = Options(micro_batches=1, recompute="full" if again else "none")
    step = Step(figures, training(config, Layout(tp, 1, 1, 1), sequence, options))

    def seconds(variant: Variant) -> float:
        time = step.layer_time(variant)
        return time.seconds + (time.forward if again and time.pair is None else 0.0)

    ours = Variant("megatron", "megatron")
    if config.block_rows >= launch.least_rows:
        ours = fused(
            replace(schedule, lanes=None, chunks=1, taper=1.0),
            schedule.lanes_for(tp),
            schedule.chunks,
            taper=schedule.taper,
            attention=launch.fuse.commfuse_attention,
            collectives_from=covering_outputs(figures, tp),
        )
    best: dict[str, tuple[float, str]] = {}
    for variant in variants(tp, tp, 1):
        if variant.name in FLAGS:
            timed = seconds(variant), variant.name
            best[variant.kind] = min(best.get(variant.kind, timed), timed)
    found = {name: time for time, name in best.values()}
    for name, variant in ((REFERENCE.name, REFERENCE), ("commfuse", ours)):
        found[name] = seconds(variant)
    return found


def check_rivals(machine: Machine, launch: Launch, schedule: Schedule) -> Iterator[Finding]:
    """A layer of the launch beside Megatron's order, CoC and MC2, at typical figures.

    Beside these stands forward-backward overlap, if the launch would start with it.

    Nothing is said of layers that are not simulated and of NPUs that are not described.  Without
    any the server with Ascend 910B is assumed.
    """
    description = _description(machine)
    if description is None or not launch.fuse.use_commfuse:
        return
    hardware = Hardware.load(find_config(description, "hardware"))
    if not_simulated(launch, hardware.machine().npus_per_node):
        return
    seconds = layer_seconds(launch, hardware, schedule)
    mine = seconds.pop("commfuse")
    left_out = {REFERENCE.name} | ({TURNS.name} if not _overlaps(launch) else set())
    ahead = sorted((t, name) for name, t in seconds.items() if t < mine and name not in left_out)
    if not ahead:
        yield _about("ok", f"none has shorter layers (simulated, {description})")
        return
    names = [f"{FLAGS[name][0]} {1 - time / mine:.1%}" for time, name in ahead]
    flags = (FLAGS[name][1] or "leave --use-commfuse out" for _, name in ahead)
    yield _about(
        "note",
        f"shorter layers (simulated, {description}): {', '.join(names)}",
        action=f"measure, too: {'; '.join(flags)}",
    )


def _overlaps(launch: Launch) -> bool:
    """Whether forwards and backwards could be paired as the launch is, and are not."""
    given = launch.options.names
    return not (
        launch.judged.overlap.obstacle
        or in_plain_pipeline(launch)
        or "--commfuse-fb-overlap" in given
    )


def in_plain_pipeline(launch: Launch) -> bool:
    """Whether it has pipeline stages, none of them virtual: overlap then takes more memory."""
    virtual = any(name.startswith("--num-") and "virtual" in name for name in launch.options.names)
    return launch.judged.layout.pipeline > 1 and not virtual


def _description(machine: Machine) -> str | None:
    found = {described(name) for name, _ in listed_npus(machine)} or {described("910B")}
    return found.pop() if len(found) == 1 else None
