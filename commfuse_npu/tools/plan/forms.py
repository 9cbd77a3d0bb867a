"""The forms in which one launch can run: CommFuse's, its rivals' and Megatron's order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from commfuse_npu.plan.slots import recomputes_all
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.plan.asked_launch import (
    AskedLaunch,
    NotSimulated,
    form_of,
    in_use,
)
from commfuse_npu.tools.plan.obstacles import Obstacles
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.timed import Range, Timed, timed
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import (
    BOTH,
    COC,
    FORMS,
    FUSED,
    MEGATRON,
    OVERLAP,
    OVERLAP_MEMORY,
)
from commfuse_npu.tools.simulate.variants import forms as simulated_forms

_EXCLUSIVE = {
    *("--use-ascend-coc", "--coc-fused-kernel", "--use-ascend-mc2"),
    *("--use-commfuse", "--commfuse-overlap", "--commfuse-overlap-memory"),
}
"""Options that choose a form.  Transfers inside of CoC's and MC2's operators leave nothing to
overlap, and MindSpeed refuses CoC with MC2."""


@dataclass(frozen=True)
class Form:
    """One way to run a launch.

    Attributes:
        flags: the options that it needs; empty for Megatron's own order.
        adds: those of them that the launch lacks.
        without: options of the launch that it has to be launched without.
        timed: the step, simulated; ``None`` if it is not.
        obstacle: why it cannot be launched, and a way out; empty if nothing known prevents it.
        remark: why it is not simulated or gains nothing, or what goes with it; may be empty.
        used: whether the launch runs in it now.
    """

    name: str
    flags: str
    adds: str
    without: str
    timed: Timed | None
    obstacle: str
    remark: str
    used: bool

    @property
    def seconds(self) -> float:
        """Seconds of a step at typical figures; infinite if it is not simulated."""
        return self.timed.typical if self.timed else math.inf

    @property
    def gibibytes(self) -> float:
        """Memory of the fullest rank; 0 if it is not simulated."""
        return self.timed.memory.total / 2**30 if self.timed else 0.0

    @property
    def fits(self) -> bool:
        return not self.timed or self.timed.fits

    @property
    def change(self) -> str:
        """What to change in the launch to get this form; empty if nothing."""
        if self.adds and self.without:
            return f"replace `{self.without}` by `{self.adds}`"
        if self.without:
            return f"leave out `{self.without}`"
        return f"add `{self.adds}`" if self.adds else ""

    def less_time(self, than: Form) -> Range | None:
        """Share of a step of another form that this one saves; ``None`` if not simulated."""
        if not self.timed or not than.timed:
            return None
        return self.timed.less_time(than.timed)

    def as_json(self, now: Form) -> dict[str, Any]:
        less = self.less_time(now)
        return {
            "name": self.name,
            "flags": self.flags,
            "change": self.change,
            "without": self.without,
            "seconds": self.timed and Range.of(self.timed.seconds)._asdict(),
            "less_time": less and less._asdict(),
            "memory_bytes": self.timed and self.timed.memory.total,
            "fits": self.fits,
            "obstacle": self.obstacle,
            "remark": self.remark,
            "used": self.used,
        }


def simulate_forms(
    launch: AskedLaunch, training: Training, hardware: Hardware, against: Obstacles
) -> dict[str, Timed]:
    """A step in each form, by the form's name.

    CoC only in its fastest number of slices and in that of the launch, and those with
    ``--use-commfuse`` as it would run.

    Raises:
        PlanError: the options form no valid schedule.
        ValueError: the simulator does not support such layers.
    """
    tp = training.layout.tp
    node = min(hardware.npus_per_node, launch.config.npus_per_node)
    if node < tp:
        raise NotSimulated(f"a group of {tp} spans nodes of {node} NPUs")
    forms = simulated_forms(hardware.machine(), training, launch.schedule, against.least)
    if against.own_schedule:
        forms = tuple(replace(form, beside="nowhere") if form.alone else form for form in forms)
    launched = [form for form in forms if form.launched and not form.tuned]
    rows = [timed(training, form, hardware) for form in launched]
    in_slices = (row for row in rows if row.form in COC)
    slower = sorted(in_slices, key=lambda row: row.typical)[1:]
    return {
        row.form.name: row
        for row in rows
        if row not in slower or row.form == form_of(launch.options)
    }


def forms_of(
    launch: AskedLaunch,
    rows: Mapping[str, Timed],
    against: Obstacles,
    hardware: Hardware,
    unsimulated: str = "",
) -> list[Form]:
    """The forms of a launch: first those that can be launched and fit an NPU, by their time.

    Args:
        rows: what :func:`simulate_forms` returns.
        unsimulated: why there are none; empty if there are.
    """
    forms = list(_forms(launch, rows, against, hardware))
    if unsimulated:
        why = f"not simulated: {unsimulated}"
        return [replace(form, remark=why) for form in forms]
    (now,) = (form for form in forms if form.used)
    forms = [
        replace(form, remark=form.remark or "as fast as now")
        if form.timed and form is not now and form.seconds == now.seconds
        else form
        for form in forms
    ]
    return sorted(forms, key=lambda form: (bool(form.obstacle), not form.fits, form.seconds))


def _forms(
    launch: AskedLaunch, rows: Mapping[str, Timed], against: Obstacles, hardware: Hardware
) -> Iterator[Form]:
    options = launch.options
    plain = needs_memory(launch)
    overlap = OVERLAP.name
    more = OVERLAP_MEMORY.name
    known = {MEGATRON.name: ("", ""), overlap: (OVERLAP.flags, against.overlap)}
    if plain:
        known[more] = (OVERLAP_MEMORY.flags, against.overlap or against.own_schedule)
    known[FUSED] = ("--use-commfuse", against.fused)
    if BOTH in rows and not (against.fused or against.overlap):
        known[BOTH] = (rows[BOTH].form.flags, "")
    for form in FORMS:
        if form.name in {*rows} - {more}:
            known.setdefault(form.name, (form.flags, ""))
    present = form_of(options)
    running = overlap if present is OVERLAP_MEMORY and not plain else present.name
    if "--use-commfuse" in options:
        fused = {MEGATRON.name: FUSED, overlap: BOTH}.get(running, running)
        running = fused if fused in known else running
    if launch.config.tensor_model_parallel_size > 1:
        known.setdefault(running, (present.flags, ""))
    elif running not in known:
        running = MEGATRON.name  # CoC and MC2 change nothing in a group of one
    for title, (flags, obstacle) in known.items():
        row = rows.get(title)
        # Passes with a partner have Megatron's layers, and the others may have fused ones.
        kept = {*flags.split(), *(["--use-commfuse"] if title in (overlap, more) else [])}
        without = " ".join(sorted(_EXCLUSIVE.intersection(options.names) - kept))
        why = _no_gain(launch, row, rows.get(MEGATRON.name), against, hardware)
        remark = why or _goes_with(flags, launch, against)
        used = title == running
        adds = _lacking(options, flags)
        yield Form(title, flags, adds, "" if used else without, row, obstacle, remark, used)


def _lacking(options: Options, flags: str) -> str:
    """The flags that a launch lacks, or has with other values."""
    wanted = Options(flags.split())
    each = (" ".join([name, *wanted.values(name)]) for name in wanted.names)
    return " ".join(words for words in each if not in_use(options, words))


def _goes_with(flags: str, launch: AskedLaunch, against: Obstacles) -> str:
    """What a reader should know of a form that can be launched."""
    if flags == "--use-commfuse" and against.also:
        return f"{', '.join(against.also)} can be given, too"
    if not flags.endswith(("--commfuse-overlap", "--commfuse-overlap-memory")):
        return ""
    if against.own_schedule:
        return f"no forward runs beside gradients: {against.own_schedule}"
    if needs_memory(launch) and not flags.endswith("-memory"):
        return "no forward runs beside gradients, which takes --commfuse-overlap-memory here"
    if against.paired == 0:
        config = launch.config
        both = 2 * config.micro_batch_size * max(1, config.data_parallel_size)
        return (
            "no forward runs beside gradients: a replica has one micro-batch per step; give "
            f"--global-batch-size {both} or more, or a smaller --micro-batch-size"
        )
    if against.paired is None:
        return ""
    return f"{100 * against.paired:.0f} % of a stage's forwards run beside gradients"


def _no_gain(
    launch: AskedLaunch,
    row: Timed | None,
    megatron: Timed | None,
    against: Obstacles,
    hardware: Hardware,
) -> str:
    """Why a form has no time, or that of Megatron's order; empty if it has another one."""
    if not row or not megatron:
        split = launch.config.uses_sequence_parallel
        return f"not simulated {'at this size' if split else 'without sequence parallelism'}"
    if row is megatron:
        return ""
    lora = row.training.shape.lora
    if lora and lora.fused and row.form.kind != "passes":
        return "layers that are fused with their adapters do not run in it"
    if row.typical != megatron.typical:
        return ""
    if row.form.kind != "passes":
        rows = launch.config.block_rows
        short = f"blocks of {rows:,} rows are shorter than the {against.least:,} worth fusing"
        return short if rows < against.least else "its operators do not take these sizes"
    step = TrainingStep(hardware.machine().launching_for_free, row.training)
    less = 1 - step.time(row.form) / step.time(megatron.form)
    if less <= 0:
        return "nothing is left to hide"
    return (
        "the host is slower than the device, and the launch keeps Megatron's order; with a host "
        f"that never delays the device: {100 * less:.1f} % less time"
    )


def needs_memory(launch: AskedLaunch) -> bool:
    """Whether forwards run beside gradients only with the option for memory: in a pipeline that is
    not interleaved, unless all layers are recomputed."""
    options = launch.options
    stages = launch.config.pipeline_model_parallel_size
    if stages == 1 or launch.chunks > 1:
        return False
    granularity, method = (
        options.text(f"--recompute-{name}") for name in ("granularity", "method")
    )
    layers = -(-launch.config.num_layers // stages)
    number = options.number("--recompute-num-layers", 1)
    return not recomputes_all(granularity, method, number, layers)
