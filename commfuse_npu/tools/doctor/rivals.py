"""What the simulator says is faster than a launch's fused layers, and how that is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.simulate.cover import covering_outputs
from commfuse_npu.tools.simulate.described import described
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, training
from commfuse_npu.tools.simulate.variants import TURNS, Variant, fused, variants

__all__ = ["check_rivals"]

_about = partial(Finding, "launch", "rivals")

_FLAGS = {
    "megatron": ("Megatron's own order", "leave --use-commfuse out"),
    **{
        f"coc-{k}": (f"CoC in {k} slices", f"--use-ascend-coc --coc-parallel-num {k}")
        for k in (2, 4, 8)
    },
    "coc-fused": ("CoC as a kernel", "--use-ascend-coc --coc-fused-kernel"),
    "mc2": ("MC2", "--use-ascend-mc2"),
    TURNS.name: ("forward-backward overlap", "--commfuse-fb-overlap"),
}
"""By name of the variant: what it is, and what is given in place of ``--use-commfuse``."""


def check_rivals(machine: Machine, launch: Launch, schedule: Schedule) -> Iterator[Finding]:
    """A layer of the launch beside Megatron's order, CoC and MC2, at typical figures.

    Beside these stands forward-backward overlap, if the launch would start with it.

    Nothing is said of groups that span nodes, of experts and of NPUs that are not described.
    Without any the server with Ascend 910B is assumed.
    """
    config, tp = launch.config, launch.config.tensor_model_parallel_size
    description = _description(machine)
    if description is None or not launch.fuse.use_commfuse or not config.uses_sequence_parallel:
        return
    figures = Hardware.load(find_config(description, "hardware")).machine()
    spans = min(figures.npus_per_node, config.npus_per_node) < tp
    if spans or "--num-experts" in launch.options:
        return
    sequence = config.seq_length // config.context_parallel_size
    step = Step(figures, training(config, Layout(tp, 1, 1, 1), sequence, Options(micro_batches=1)))
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
    others = [one for one in variants(tp, tp, 1) if one != TURNS]
    others += [TURNS] * _overlaps(launch)

    def seconds(variant: Variant) -> float:
        return step.layer_time(variant).seconds

    mine = seconds(ours)
    # The fastest of each kind.
    best: dict[str, tuple[float, str]] = {}
    for variant in others:
        if variant.name in _FLAGS:
            timed = seconds(variant), variant.name
            best[variant.kind] = min(best.get(variant.kind, timed), timed)
    ahead = sorted(one for one in best.values() if one[0] < mine)
    if not ahead:
        yield _about("ok", f"none has shorter layers (simulated, {description})")
        return
    names = [f"{_FLAGS[name][0]} {1 - time / mine:.1%}" for time, name in ahead]
    yield _about(
        "note",
        f"shorter layers (simulated, {description}): {', '.join(names)}",
        action=f"measure, too: {'; '.join(_FLAGS[name][1] for _, name in ahead)}",
    )


def _overlaps(launch: Launch) -> bool:
    """Whether forwards and backwards could be paired as the launch is, and are not."""
    given = launch.options.names
    virtual = any(name.startswith("--num-") and "virtual" in name for name in given)
    plain_pipeline = launch.judged.layout.pipeline > 1 and not virtual
    return not (
        launch.judged.overlap.obstacle or plain_pipeline or "--commfuse-fb-overlap" in given
    )


def _description(machine: Machine) -> str | None:
    found = {described(name) for name, _ in listed_npus(machine)} or {described("910B")}
    return found.pop() if len(found) == 1 else None
