"""Compares the forms of one launch: CommFuse's, its rivals' and Megatron's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import min_outputs_to_hide
from commfuse_npu.plan import PlanError
from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.markdown import table_row
from commfuse_npu.tools.plan.checks import check_launch
from commfuse_npu.tools.plan.expert_layouts import ExpertLayout, expert_layouts
from commfuse_npu.tools.plan.launch import AskedLaunch
from commfuse_npu.tools.plan.training import NotSimulated, roughly, training_of
from commfuse_npu.tools.plan.transfers import FusedLayer, check_lanes, fused_layers
from commfuse_npu.tools.simulate.footprint import footprint
from commfuse_npu.tools.simulate.launch_options import FORMS
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import COC, FB_OVERLAP, MEGATRON, fused
from commfuse_npu.tools.simulate.variants import forms as simulated_forms

__all__ = ["Form", "LaunchPlan", "plan_launch"]

_FUSED = "fused layers"

_LAYOUTS = 4
"""Number of expert layouts that are shown."""
_LEGEND = (
    "Time and memory (of tensors, on the fullest rank): simulated at typical figures. Overlap: "
    "with the micro-batches that have no partner in Megatron's order. Not checked: whether CoC "
    "and MC2 support this launch."
)


class Form(NamedTuple):
    """One way to run a launch.

    Attributes:
        flags: the options to add for it; empty for Megatron's own order.
        seconds: of a step; ``None`` if not simulated.
        mebibytes: of tensors on the fullest rank; ``None`` if not simulated.
        obstacle: why it cannot be launched; empty if nothing known here prevents it.
    """

    name: str
    flags: str
    seconds: float | None
    mebibytes: float | None
    obstacle: str = ""


class LaunchPlan(NamedTuple):
    """The answer for one launch.

    Attributes:
        transfers: whether it has transfers of tensor, expert or context parallelism.
        not_simulated: why no form has a time; empty if they have.
        hardware: name of the described machine.
        findings: problems of the launch as it is, and the cost of its lanes.
        experts: possible layouts of its experts, fastest first.
        schedule, layers: what ``--use-commfuse`` would run; empty if the launch cannot start.
    """

    name: str
    layout: str
    transfers: bool
    forms: tuple[Form, ...]
    not_simulated: str
    hardware: str
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    schedule: str
    layers: tuple[FusedLayer, ...]
    experts: tuple[ExpertLayout, ...] = ()

    @property
    def best(self) -> Form | None:
        """The fastest form that can be launched; if none is simulated, CommFuse's first."""
        possible = [form for form in self.forms if not form.obstacle]
        timed = [form for form in possible if form.seconds is not None]
        if timed:
            return min(timed, key=lambda form: form.seconds or 0.0)
        return next((form for form in possible if form.flags.startswith("--")), None)

    @property
    def adds(self) -> bool:
        """Whether flags should be added."""
        return self.best is not None and bool(self.best.flags)

    @property
    def ends(self) -> str:
        """Why the launch would stop at its start in any form; empty if it does not."""
        return next((finding.value for finding in self.findings if finding.subject == "layout"), "")

    @property
    def verdict(self) -> str:
        if self.ends:
            return f"As it is, the launch would fail at its start: {self.ends}"
        best = self.best
        if best is None or not best.flags:
            why = {form.obstacle for form in self.forms if form.obstacle}
            return f"Nothing to add: {'; '.join(sorted(why)) or 'this order is the fastest'}."
        if best.seconds is None:
            return f"Add {best.flags}: {best.name}. The gain is not known."
        megatron = next(form.seconds for form in self.forms if not form.flags)
        assert megatron is not None
        return (
            f"Add {best.flags}: with {best.name} a step takes {1 - best.seconds / megatron:.1%} "
            f"less time than in Megatron's order (simulated, {self.hardware}, typical figures)."
        )

    def __str__(self) -> str:
        has = "has" if self.transfers else "has no"
        lines = [f"{self.name}: {self.layout}"]
        lines.append(f"It {has} transfers of tensor, expert or context parallelism.")
        lines += [f"Note: {note}." for note in self.notes]
        lines += map(str, self.findings)
        if self.not_simulated:
            lines.append(f"Not simulated: {self.not_simulated}.")
        head = "form", "ms per step", "MiB", "flags", "why it cannot be launched"
        lines += ["", table_row(head), "|---|---:|---:|---|---|"]
        for form in self.forms:
            time = "-" if form.seconds is None else f"{1e3 * form.seconds:,.0f}"
            memory = "-" if form.mebibytes is None else f"{form.mebibytes:,.0f}"
            flags = f"`{form.flags}`" if form.flags else "-"
            lines.append(table_row([form.name, time, memory, flags, form.obstacle or "-"]))
        lines += ["", _LEGEND, *self._expert_layouts()]
        refused = any(form.obstacle for form in self.forms if form.flags == "--use-commfuse")
        if self.layers and not refused:
            lines += ["", f"Layers with --use-commfuse, forward, per rank ({self.schedule}):"]
            lines += [f"  {layer}" for layer in self.layers]
        return "\n".join(lines)

    def _expert_layouts(self) -> list[str]:
        """A table of the fastest layouts of the experts, and the present one."""
        if not self.experts:
            return []
        head = "EP", "expert TP", "ms per step", "of it to experts and back"
        lines = ["", table_row(head), "|---:" * len(head) + "|"]
        fastest = self.experts[:_LAYOUTS]
        for layout in [*fastest, *(layout for layout in self.experts[_LAYOUTS:] if layout.present)]:
            parallel = f"{layout.parallel} (as it is)" if layout.present else str(layout.parallel)
            cells = (
                parallel,
                str(layout.tensor),
                f"{1e3 * layout.seconds:,.0f}",
                f"{layout.share:.0%}",
            )
            lines.append(table_row(cells))
        legend = "Layouts of experts: in Megatron's order, simulated at typical figures."
        return [*lines, "", legend]

    def as_json(self) -> dict[str, Any]:
        fields = "forms", "layers", "experts"
        rows = {name: [entry._asdict() for entry in getattr(self, name)] for name in fields}
        rows["findings"] = [finding.as_json() for finding in self.findings]
        return self._asdict() | rows | {"verdict": self.verdict}


def _costs(
    launch: AskedLaunch, training: Training, hardware: Hardware
) -> dict[str, tuple[float, float]]:
    """Seconds of a step and MiB of tensors at typical figures, by form.

    Returns:
        By title: :data:`FORMS`, with CoC only in its fastest number of slices, and :data:`_FUSED`
        as ``--use-commfuse`` would run it.  Without sequence parallelism there is nothing to fuse,
        and only Megatron's order and forward-backward overlap are included.

    Raises:
        PlanError: the options form no valid schedule.
        ValueError: the simulator does not support such layers.
    """
    figures, tp, schedule = hardware.machine(), training.layout.tp, launch.schedule
    if min(hardware.npus_per_node, launch.config.npus_per_node) < tp:
        raise NotSimulated(f"a group of {tp} spans nodes of {hardware.npus_per_node} NPUs")
    forms = {FORMS[form][0]: form for form in simulated_forms(figures, training) if form in FORMS}
    if tp > 1 and training.sequence_parallel:
        forms[_FUSED] = MEGATRON
        if launch.config.block_rows >= launch.judged.least:
            forms[_FUSED] = fused(
                replace(schedule, lanes=schedule.lanes_for(tp)),
                collectives_from=min_outputs_to_hide(figures, tp),
            )
    step = Step(figures, training)
    seconds = {title: step.time(form).seconds for title, form in forms.items()}
    in_slices = (title for title, form in forms.items() if form in COC)
    for slower in sorted(in_slices, key=seconds.__getitem__)[1:]:
        del forms[slower]
    sizes = {title: footprint(training, form, hardware) for title, form in forms.items()}
    return {
        title: (seconds[title], (size.total - size.communication) / 2**20)
        for title, size in sizes.items()
    }


def _forms(
    launch: AskedLaunch, costs: Mapping[str, tuple[float, float]], findings: Sequence[Finding]
) -> list[Form]:
    judged = launch.judged
    # Conflicts between CommFuse's own options prevent only the fused layers.
    errors = [
        finding for finding in findings if finding.level == "error" and finding.subject != "layout"
    ]
    lacking = "; ".join(
        f"{finding.subject}: {finding.expected or finding.value}" for finding in errors
    )
    virtual = any(name.startswith("--num-") and "virtual" in name for name in launch.options.names)
    memory = " --commfuse-fb-overlap-memory" * (judged.layout.pipeline > 1 and not virtual)
    refusals = "; ".join(f"{option}: {why}" for option, why in judged.refused.items())

    def form(title: str, flags: str, obstacle: str = "") -> Form:
        seconds, mebibytes = costs.get(title, (None, None))
        return Form(title, flags, seconds, mebibytes, obstacle)

    megatron, overlap = FORMS[MEGATRON], FORMS[FB_OVERLAP]
    rivals = (
        pair for pair in FORMS.values() if pair[0] in costs and pair not in (megatron, overlap)
    )
    return [
        form(*megatron),
        form(overlap[0], overlap[1] + memory, judged.overlap.obstacle),
        form(_FUSED, "--use-commfuse", refusals or lacking),
        *(form(*pair) for pair in rivals),
    ]


def plan_launch(launch: AskedLaunch, hardware: Hardware, environ: Mapping[str, str]) -> LaunchPlan:
    """Compare the forms in which a launch can run.

    Args:
        environ: environment variables where the launch is started.

    Raises:
        PlanError: the options form no valid schedule.
    """
    judged, overlap = launch.judged, launch.judged.overlap
    findings = check_launch(launch)
    can_start = not any(finding.subject == "layout" for finding in findings)
    layers = fused_layers(launch) if can_start else []
    findings += check_lanes(launch, environ) if can_start else []
    if launch.variables.get("HCCL_DETERMINISTIC", "").lower() == "true":
        hardware = replace(hardware, deterministic=True)
    reason, costs, laid_out, rough = "", {}, list[ExpertLayout](), list[str]()
    try:
        training = training_of(launch)
        costs = _costs(launch, training, hardware)
        laid_out = expert_layouts(training, hardware.machine())
        rough = roughly(launch.options)
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
        reason = str(error)
    names = [f"{layer.layer} ({layer.reason})" for layer in judged.layers if layer.state == "left"]
    also = [name for name, why in judged.why_not.items() if not why and not judged.excluded]
    notes = [*launch.notes, *rough, *judged.notes]
    notes += [f"{', '.join(names)} stay Megatron's" for _ in names[:1]]
    notes += [f"with --use-commfuse {', '.join(also)} can be given, too" for _ in also[:1]]
    if overlap.paired is not None:
        notes.append(f"{overlap.paired:.0%} of a stage's forwards have a partner")
    return LaunchPlan(
        launch.name,
        str(judged.layout),
        overlap.transfers,
        tuple(_forms(launch, costs, findings)),
        reason,
        hardware.name,
        tuple(notes),
        tuple(findings),
        str(launch.schedule) if can_start else "",
        tuple(layers),
        tuple(laid_out),
    )
