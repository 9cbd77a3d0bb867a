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
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.launch_script.options import value_of
from commfuse_npu.tools.refusals import FB_OVERLAP_REFUSALS, FLOW_REFUSALS
from commfuse_npu.tools.simulate.cover import covering_outputs
from commfuse_npu.tools.simulate.described import described
from commfuse_npu.tools.simulate.flow import divides
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, training
from commfuse_npu.tools.simulate.variants import FLOWS, TURNS, Variant, flowing, fused, variants

__all__ = ["check_rivals"]

_about = partial(Finding, "launch", "rivals")

_IMPL = "--transformer-impl"

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

    Beside these stand forward-backward overlap and a flow, if the launch would start with them, and
    beside a flow operator by operator.

    Nothing is said of groups that span nodes, of experts and of NPUs that are not described.
    Without any the server with Ascend 910B is assumed.
    """
    config, tp = launch.config, launch.config.tensor_model_parallel_size
    description = _description(machine)
    if description is None or not launch.fuse.use_commfuse or not config.uses_sequence_parallel:
        return
    hardware = Hardware.load(find_config(description, "hardware"))
    figures = hardware.machine()
    if min(figures.npus_per_node, config.npus_per_node) < tp or value_of(
        launch.options, "--num-experts"
    ):
        return
    one = Options(micro_batches=1)
    sequence = config.seq_length // config.context_parallel_size
    step = Step(figures, training(config, Layout(tp, 1, 1, 1), sequence, one))
    operators = Variant("megatron", "megatron")
    if config.block_rows >= min_rows_of(tp, config.hidden_size, launch.fuse):
        operators = fused(
            replace(schedule, lanes=None, chunks=1, taper=1.0),
            schedule.lanes_for(tp),
            schedule.chunks,
            taper=schedule.taper,
            attention=launch.fuse.attention,
            collectives_from=covering_outputs(figures, tp),
        )
    chunks = [launch.fuse.flow] if launch.fuse.flow is not None else FLOWS
    flows = [flowing(k) for k in chunks if _flows(launch, step, k)]
    overlapping = [TURNS] if _overlaps(launch) else []
    local = "" if value_of(launch.options, _IMPL) else f" {_IMPL} local"
    named = {
        **_FLAGS,
        **{
            flow.name: (f"a flow of {flow.slices} chunks", f"--commfuse-flow {flow.slices}{local}")
            for flow in flows
        },
    }
    if launch.fuse.flow is not None and flows:
        ours, others = flows[0], [operators, *overlapping]
        named[operators.name] = "operator by operator", "leave --commfuse-flow out"
    else:
        ours, others = operators, [*flows, *overlapping]

    def seconds(variant: Variant) -> float:
        return step.layer_time(variant).seconds

    mine = seconds(ours)
    # The fastest of each kind.
    best: dict[str, tuple[float, str]] = {}
    rivals = (variant for variant in variants(tp, tp, 1) if variant != TURNS)
    for variant in [*others, *rivals]:
        if variant.name in named:
            timed = seconds(variant), variant.name
            best[variant.kind] = min(best.get(variant.kind, timed), timed)
    ahead = sorted(one for one in best.values() if one[0] < mine)
    if not ahead:
        yield _about("ok", f"none has shorter layers (simulated, {description})")
        return
    names = [f"{named[name][0]} {1 - time / mine:.1%}" for time, name in ahead]
    flags = [named[name][1] for _, name in ahead]
    yield _about(
        "note",
        f"shorter layers (simulated, {description}): {', '.join(names)}",
        action=f"measure, too: {'; '.join(flags)}",
    )


def _overlaps(launch: Launch) -> bool:
    """Whether a launch could pair forwards and backwards, and does not."""
    config, options = launch.config, launch.options
    refused = any(one.value_in(options) is not None for one in FB_OVERLAP_REFUSALS)
    plain_pipeline = config.pipeline_model_parallel_size > 1 and not any(
        word.startswith("--num-") and "virtual" in word for word in options
    )
    several = config.global_batch_size > config.micro_batch_size * config.data_parallel_size
    return several and not (refused or plain_pipeline or "--commfuse-fb-overlap" in options)


def _flows(launch: Launch, step: Step, chunks: int) -> bool:
    """Whether a launch with so many chunks would start, and its layers be in the flow.

    One that does not choose an implementation of layers may choose the local one besides.
    """
    config, least, asked = launch.config, launch.fuse.min_rows, launch.fuse.flow is not None
    given = (one for one in FLOW_REFUSALS if one.value_in(launch.options) is not None)
    refused = {one.option.split()[0] for one in given}
    if not asked and value_of(launch.options, _IMPL) is None:
        refused.discard(_IMPL)
    fits = divides(step.training.shape, chunks)
    return fits and not refused and (least == "auto" or config.block_rows >= least)


def _description(machine: Machine) -> str | None:
    found = {described(name) for name, _ in listed_npus(machine)} or {described("910B")}
    return found.pop() if len(found) == 1 else None
