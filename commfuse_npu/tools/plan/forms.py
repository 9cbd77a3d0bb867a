"""Compares the forms of one launch: CommFuse's, its rivals' and Megatron's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.plan import PlanError
from commfuse_npu.plan.slots import recomputes_all
from commfuse_npu.tools.launch_script.short_run import PEERS
from commfuse_npu.tools.model_config import problems
from commfuse_npu.tools.plan.launch import (
    AskedLaunch,
    NotSimulated,
    form_of,
    in_use,
    model_chunks,
    roughly,
    size_of,
    training_of,
)
from commfuse_npu.tools.plan.obstacles import Judged, Obstacles, obstacles
from commfuse_npu.tools.simulate.footprint import footprint, limit
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import COC, FORMS, MEGATRON, OVERLAP, OVERLAP_MEMORY
from commfuse_npu.tools.simulate.variants import forms as simulated_forms
from commfuse_npu.tools.terminal import table_row

_LITTLE = 0.01
"""Share of a step that a further option has to save."""
_FUSED = "fused layers"
_BOTH = "overlap and fused layers"
_EXCLUSIVE = {
    *("--use-ascend-coc", "--coc-fused-kernel", "--use-ascend-mc2"),
    *("--use-commfuse", "--commfuse-overlap", "--commfuse-overlap-memory"),
}
"""Options that choose a form.  Transfers inside of CoC's and MC2's operators leave nothing to
overlap, and MindSpeed refuses CoC with MC2."""
_LEGEND = (
    "Time and memory (of the fullest rank, with the buffers of transfers and communicators): "
    "simulated at typical figures. Overlap: the forward of another micro-batch, gradients, "
    "recomputation and weight gradients hide each other's transfers; a lone forward runs in "
    "Megatron's order, or with fused layers. Not checked: whether CoC and MC2 support this launch."
)


class Form(NamedTuple):
    """One way to run a launch.

    Attributes:
        flags: the options that it needs; empty for Megatron's own order.
        without: options of the launch that it has to be launched without.
        seconds: of a step; ``None`` if not simulated.
        mebibytes: of the fullest rank; ``None`` if not simulated.
        obstacle: why it cannot be launched, and a way out; empty if nothing known prevents it.
        used: whether the launch runs in it, and not in Megatron's order.
    """

    name: str
    flags: str
    without: str
    seconds: float | None
    mebibytes: float | None
    obstacle: str = ""
    used: bool = False

    @property
    def change(self) -> str:
        """What to change in the launch to get this form; empty if nothing."""
        leave_out = f"leave {self.without} out" if self.without else ""
        add = f"add {self.flags}" if self.flags else ""
        return " and ".join(filter(None, (leave_out, add)))

    def saves_little(self, others: Sequence[Form]) -> bool:
        """Whether one with a part of these options takes hardly longer."""
        options = set(self.flags.split())
        return any(
            {*other.flags.split()} < options
            and (other.seconds or 0.0) * (1 - _LITTLE) <= (self.seconds or 0.0)
            for other in others
            if other.flags
        )


class LaunchPlan(NamedTuple):
    """The answer for one launch.

    Attributes:
        hardware: name of the described machine.
        usable: MiB of an NPU that a training can use.
        problems: why the launch would fail at its start in any form.
        schedule, layers: what ``--use-commfuse`` would run; empty if the launch cannot start.
    """

    name: str
    layout: str
    forms: tuple[Form, ...]
    hardware: str
    usable: float
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    schedule: str
    layers: tuple[Judged, ...]

    @property
    def best(self) -> Form | None:
        """The fastest form that can be launched and fits an NPU, if one does.

        If none is simulated, it is CommFuse's first.  Then fused layers count only if at least one
        layer is fused, and no form that another one has to make room for.
        """
        possible = [form for form in self.forms if not form.obstacle]
        timed = [form for form in possible if form.seconds is not None]
        timed = [form for form in timed if self.fits(form)] or timed
        worth = [form for form in timed if form.used or not form.saves_little(timed)]
        if worth:
            return min(worth, key=lambda form: (form.seconds, not form.used))
        fuses = not all(layer.reason for layer in self.layers)
        addable = (form for form in possible if form.flags and not form.without)
        return next((form for form in addable if form.name != _FUSED or fuses), None)

    @property
    def present(self) -> Form:
        """What the launch runs now: Megatron's order, unless it has the options of another form."""
        return next((form for form in self.forms if form.used), self.forms[0])

    @property
    def saved(self) -> float | None:
        """Share of the present time of a step that the best form saves; ``None`` if not known."""
        now = self.present.seconds
        best = self.best
        if now is None or best is None or best.seconds is None:
            return None
        return 1 - best.seconds / now

    def fits(self, form: Form) -> bool:
        return (form.mebibytes or 0.0) <= self.usable

    def _memory(self, form: Form) -> str:
        """A sentence if the form does not fit."""
        if self.fits(form):
            return ""
        return (
            f" It probably runs out of memory: it needs {form.mebibytes:,.0f} MiB, and "
            f"{self.usable:,.0f} MiB of an NPU are usable."
        )

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"As it is, the launch would fail at its start: {self.problems[0]}"
        best = self.best
        present = self.present
        if best is None or best is present:
            why = [f"{form.name} is in use" for form in self.forms if form.used]
            why += [f"no {form.name} ({form.obstacle})" for form in self.forms if form.obstacle]
            nothing = f"Nothing to add: {', '.join(why) or 'this order is the fastest'}."
            return nothing + self._memory(present)
        change = best.change[0].upper() + best.change[1:]
        if self.saved is None:
            return f"{change}: {best.name}. The gain is not known."
        now = f"with {present.name}, as now" if present.used else "in Megatron's order"
        summary = (
            f"{change}: with {best.name} a step takes {self.saved:.1%} "
            f"less time than {now} (simulated, {self.hardware}, typical figures)."
        )
        return summary + self._memory(best)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.layout}"]
        lines += [f"error: {problem}" for problem in self.problems]
        lines += [f"Note: {note}." for note in self.notes]
        head = "form", "ms per step", "MiB", "flags", "why not"
        lines += ["", table_row(head), "|---|---:|---:|---|---|"]
        for form in self.forms:
            time = "-" if form.seconds is None else f"{1e3 * form.seconds:,.0f}"
            memory = "-" if form.mebibytes is None else f"{form.mebibytes:,.0f}"
            if not self.fits(form):
                memory += " (too much)"
            with_flags = f"`{form.flags}`" if form.flags else ""
            without = f"without `{form.without}`" if form.without else ""
            flags = ", ".join(filter(None, (with_flags, without))) or "-"
            name = f"{form.name} (in use)" if form.used else form.name
            lines.append(table_row([name, time, memory, flags, form.obstacle or "-"]))
        lines += ["", _LEGEND]
        refused = any(form.obstacle for form in self.forms if form.flags == "--use-commfuse")
        if self.layers and not refused:
            lines += ["", f"Layers with --use-commfuse, forward, per rank ({self.schedule}):"]
            lines += [f"  {layer}" for layer in self.layers]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        rows: dict[str, Any] = {
            name: [entry._asdict() for entry in getattr(self, name)] for name in ("forms", "layers")
        }
        return self._asdict() | rows | {"verdict": self.verdict}


def _costs(
    launch: AskedLaunch, training: Training, hardware: Hardware, against: Obstacles
) -> dict[str, tuple[float, float]]:
    """Seconds of a step and MiB at typical figures, by form.

    Returns:
        By title: :data:`FORMS`, with CoC only in its fastest number of slices and in that of the
        launch, and those with ``--use-commfuse`` as it would run.

    Raises:
        PlanError: the options form no valid schedule.
        ValueError: the simulator does not support such layers.
    """
    figures = hardware.machine()
    tp = training.layout.tp
    node = min(hardware.npus_per_node, launch.config.npus_per_node)
    if node < tp:
        raise NotSimulated(f"a group of {tp} spans nodes of {node} NPUs")
    titles = {form.name: title for form, (title, _) in FORMS.items()}
    titles |= {"commfuse": _FUSED, "commfuse-both": _BOTH}
    forms = simulated_forms(figures, training, launch.schedule, against.least)
    if against.own_schedule:
        forms = tuple(replace(form, beside="nowhere") if form.alone else form for form in forms)
    step = TrainingStep(figures, training)
    seconds = {form: step.time(form) for form in forms if form.name in titles}
    in_slices = [form for form in seconds if form in COC]
    slower = sorted(in_slices, key=seconds.__getitem__)[1:]
    return {
        titles[form.name]: (time, footprint(training, form, hardware).total / 2**20)
        for form, time in seconds.items()
        if form not in slower or form == form_of(launch.options)
    }


def _forms(
    launch: AskedLaunch, costs: Mapping[str, tuple[float, float]], against: Obstacles
) -> Iterator[Form]:
    options = launch.options
    plain = _needs_memory(launch)
    overlap, flags = FORMS[OVERLAP]
    more, more_flags = FORMS[OVERLAP_MEMORY]
    megatron, _ = FORMS[MEGATRON]
    rows = {megatron: ("", ""), overlap: (flags, against.overlap)}
    if plain:
        rows[more] = (more_flags, against.overlap or against.own_schedule)
    rows[_FUSED] = ("--use-commfuse", against.fused)
    if _BOTH in costs and not (against.fused or against.overlap):
        rows[_BOTH] = (f"--use-commfuse {flags}", "")
    rows |= {
        title: (flags, "") for title, flags in FORMS.values() if title in {*costs} - {*rows, more}
    }
    running, _ = FORMS[form_of(options)]
    if running == more and not plain:
        running = overlap
    if "--use-commfuse" in options:
        fused = {megatron: _FUSED, overlap: _BOTH}.get(running, running)
        running = fused if fused in rows else running
    for title, (flags, obstacle) in rows.items():
        seconds, mebibytes = costs.get(title, (None, None))
        used = bool(flags) and title == running and in_use(options, flags)
        # Passes with a partner have Megatron's layers, and the others may have fused ones.
        kept = {*flags.split(), *(["--use-commfuse"] if title in (overlap, more) else [])}
        without = " ".join(sorted(_EXCLUSIVE.intersection(options.names) - kept))
        yield Form(title, flags, without, seconds, mebibytes, obstacle, used)


def _needs_memory(launch: AskedLaunch) -> bool:
    """Whether forwards run beside gradients only with the option for memory: in a pipeline that is
    not interleaved, unless all layers are recomputed."""
    options = launch.options
    stages = launch.config.pipeline_model_parallel_size
    if stages == 1 or model_chunks(options, stages) > 1:
        return False
    granularity, method = (
        options.text(f"--recompute-{name}") for name in ("granularity", "method")
    )
    layers = -(-launch.config.num_layers // stages)
    number = options.number("--recompute-num-layers", 1)
    return not recomputes_all(granularity, method, number, layers)


def _layout(launch: AskedLaunch) -> str:
    """The parallel sizes of a launch."""
    config = launch.config
    sizes = {
        "TP": config.tensor_model_parallel_size,
        "PP": config.pipeline_model_parallel_size,
        "CP": config.context_parallel_size,
        "EP": size_of(launch.options, "expert-model"),
        "DP": config.data_parallel_size,
    }
    parts = [f"{name} {size}" for name, size in sizes.items()]
    return ", ".join([*parts, *["sequence parallel"] * config.uses_sequence_parallel])


def _problems(launch: AskedLaunch) -> list[str]:
    """Why the launch would fail at its start: mismatches of model, layout and batch."""
    # With --kv-channels the hidden size need not be divisible by the heads.
    may = "hidden size" if "--kv-channels" in launch.options else "nothing"
    return [line for line in problems(launch.config) if not line.startswith(may)]


def _without_peers(launch: AskedLaunch) -> AskedLaunch:
    """The launch without the overlaps that CommFuse would take the place of."""
    options = launch.options.copy()
    options.drop(*PEERS)
    return replace(launch, command=replace(launch.command, options=options))


def plan_launch(launch: AskedLaunch, hardware: Hardware) -> LaunchPlan:
    """Compare the forms in which a launch can run.

    Raises:
        PlanError: the options form no valid schedule.
    """
    against = obstacles(_without_peers(launch))
    wrong = _problems(launch)
    ordered = launch.command.environment.get("HCCL_DETERMINISTIC", "").lower()
    if ordered in ("true", "strict") or "--npu-deterministic" in launch.options:
        hardware = replace(hardware, deterministic=True)
    costs = {}
    about = roughly(launch.options)
    try:
        if not wrong:
            costs = _costs(launch, training_of(launch), hardware, against)
    except PlanError:
        raise
    except ValueError as error:
        about = [f"no form is simulated: {error}"]
    notes = [*launch.command.notes, *about, *against.notes]
    if against.own_schedule:
        notes.append(f"no forward runs beside gradients: {against.own_schedule}")
    elif against.paired is not None and not against.overlap:
        _, flags = FORMS[OVERLAP_MEMORY if _needs_memory(launch) else OVERLAP]
        beside = f"{against.paired:.0%} of a stage's forwards run beside gradients"
        notes.append(f"with {flags} {beside}")
    return LaunchPlan(
        launch.name,
        _layout(launch),
        tuple(_forms(launch, costs, against)),
        hardware.name,
        limit(hardware) / 2**20,
        tuple(notes),
        tuple(wrong),
        "" if wrong else str(launch.schedule),
        () if wrong else tuple(against.layers),
    )
