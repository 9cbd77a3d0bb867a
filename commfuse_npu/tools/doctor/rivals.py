"""What the simulator says is faster than a launch's fused layers, and how that is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.fuse_options import min_rows_of
from commfuse_npu.tools.doctor.launch import Launch, value_of
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.simulate.cover import covering_outputs
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, training
from commfuse_npu.tools.simulate.variants import Variant, fused, variants

__all__ = ["check_rivals"]

_about = partial(Finding, "launch", "rivals")

_DESCRIBED = {"910B": "ascend_910b_server", "Ascend910": "ascend_910c_supernode"}
"""Descriptions by how npu-smi's name of the NPU begins."""

_FLAGS = {
    "megatron": ("Megatron's own order", "leave --use-commfuse out"),
    "sliced": ("CoC in {slices} slices", "--use-ascend-coc --coc-parallel-num {slices}"),
    "coc_fused": ("CoC as a kernel", "--use-ascend-coc --coc-fused-kernel"),
    "kernel": ("MC2 (if cutting costs it nothing)", "--use-ascend-mc2"),
}
"""By kind of variant: what it is, and what is given in place of ``--use-commfuse``."""


def check_rivals(machine: Machine, launch: Launch, schedule: Schedule) -> Iterator[Finding]:
    """A layer of the launch beside Megatron's order, CoC and MC2, at typical figures.

    Nothing is said of groups that span nodes, of experts and of NPUs that are not described.
    Without any the server with Ascend 910B is assumed.
    """
    config, tp = launch.config, launch.config.tensor_model_parallel_size
    described = _description(machine)
    if described is None or not launch.fuse.use_commfuse or not config.uses_sequence_parallel:
        return
    hardware = Hardware.load(find_config(described, "hardware"))
    figures = hardware.machine()
    if min(figures.npus_per_node, config.npus_per_node) < tp or value_of(
        launch.options, "--num-experts"
    ):
        return
    if config.block_rows < min_rows_of(config, launch.fuse):
        ours = Variant("megatron", "megatron")
    else:
        ours = fused(
            replace(schedule, lanes=None, chunks=1, taper=1.0),
            schedule.lanes_for(tp),
            schedule.chunks,
            taper=schedule.taper,
            attention=launch.fuse.attention,
            collectives_from=covering_outputs(figures, tp),
        )
    one = Options(micro_batches=1)
    sequence = config.seq_length // config.context_parallel_size
    step = Step(figures, training(config, Layout(tp, 1, 1, 1), sequence, one))

    def seconds(variant: Variant) -> float:
        return sum(step.layer(variant, half).seconds for half in ("forward", "backward"))

    mine = seconds(ours)
    # The fastest of each kind; what is tuned for each operation nobody can launch.
    best: dict[str, tuple[float, Variant]] = {}
    for variant in variants(tp, tp, 1):
        if variant.kind in _FLAGS and not variant.tuned:
            timed = seconds(variant), variant
            best[variant.kind] = min(best.get(variant.kind, timed), timed, key=lambda of: of[0])
    ahead = sorted((one for one in best.values() if one[0] < mine), key=lambda of: of[0])
    if not ahead:
        yield _about("ok", f"none has shorter layers (simulated, {described})")
        return
    names, flags = [], []
    for time, variant in ahead:
        name, flag = (text.format(slices=variant.slices) for text in _FLAGS[variant.kind])
        names.append(f"{name} {1 - time / mine:.1%}")
        flags.append(flag)
    yield _about(
        "note",
        f"shorter layers (simulated, {described}): {', '.join(names)}",
        action=f"measure, too: {'; '.join(flags)}",
    )


def _description(machine: Machine) -> str | None:
    names = {name for name, _ in listed_npus(machine)} or {"910B"}
    return next(
        (
            described
            for beginning, described in _DESCRIBED.items()
            if all(name.startswith(beginning) for name in names)
        ),
        None,
    )
