"""The answer for one launch: the form to run it in, and the table of all forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from commfuse_npu.plan import PlanError
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.launch_script.short_run import PEERS
from commfuse_npu.tools.model_config import problems
from commfuse_npu.tools.plan.asked_launch import (
    AskedLaunch,
    roughly,
    training_of,
)
from commfuse_npu.tools.plan.forms import Form, forms_of, simulate_forms
from commfuse_npu.tools.plan.obstacles import Judged, obstacles
from commfuse_npu.tools.simulate.footprint import limit
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.timed import Range, has_more, saves
from commfuse_npu.tools.simulate.variants import LEGEND
from commfuse_npu.tools.terminal import table_row

_MORE_MEMORY = 1.1
"""Of the present form's, if no form fits: the estimate may be too high for all."""
_PARTS = {"computation": "computation", "bubble": "bubble", "host": "waiting for the host"}
"""Names of parts of a step; others are transfers."""
_LEGEND = (
    "Simulated, not measured: a step at typical figures of the machine, with the range over its "
    "uncertain figures; memory of the fullest rank, with communicators. Whether CoC and MC2 "
    f"support this launch is not checked. {LEGEND}"
)


@dataclass(frozen=True)
class LaunchPlan:
    """The answer for one launch.

    Attributes:
        forms: those that can be launched and fit an NPU first, by their time.
        hardware: the described machine.
        problems: why the launch would fail at its start in any form.
        unsimulated: why no form is simulated; empty if some are.
        schedule, layers: what ``--use-commfuse`` would run; empty if the launch cannot start.
    """

    name: str
    layout: str
    forms: tuple[Form, ...]
    hardware: Hardware
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    unsimulated: str
    schedule: str
    layers: tuple[Judged, ...]

    @property
    def usable(self) -> float:
        """GiB of an NPU for a training."""
        return limit(self.hardware) / 2**30

    @property
    def now(self) -> Form:
        """What the launch runs now."""
        return next(form for form in self.forms if form.used)

    @property
    def reference(self) -> Form:
        """The form that others are compared with: the present one, if it is simulated."""
        return self.now if self.now.timed else next(form for form in self.forms if not form.flags)

    @cached_property
    def best(self) -> Form:
        """The form to run the launch in.

        It is the fastest that can be launched and fits an NPU; if none fits by the estimate, that
        needs at most a tenth more memory than the present one.  It has to save a hundredth of a
        step beside the present form and beside each with a part of its options.  If no form is
        simulated, it is overlap, else fused layers if any layer is fused, where nothing prevents
        them.
        """
        possible = [form for form in self.forms if not form.obstacle]
        timed = [form for form in possible if form.timed]
        most = _MORE_MEMORY * self.reference.gibibytes
        timed = [form for form in timed if form.fits] or [
            form for form in timed if form.gibibytes <= most
        ]
        for form in timed:
            others = (
                other
                for other in timed
                if other is self.reference or has_more(form.flags, other.flags)
            )
            if form is self.now or all(saves(form.seconds, other.seconds) for other in others):
                return form
        if timed:
            return self.now
        fuses = not all(layer.reason for layer in self.layers)
        ours = ["--commfuse-overlap", *["--use-commfuse"] * fuses]
        addable = (form for form in possible if form.flags in ours and not form.without)
        return next(addable, self.now)

    @property
    def saved(self) -> Range | None:
        """Share of the present time of a step that the best form saves; ``None`` if not known."""
        return self.best.less_time(self.reference)

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"As it is, the launch would fail at its start: {self.problems[0]}"
        best = self.best
        if best is self.now:
            return " ".join(["Nothing to change.", *self._why_nothing(), *self._memory()])
        change = best.change[0].upper() + best.change[1:]
        saved = self.saved
        if not saved:
            return f"{change}: {best.name}. The gain is not known: {self.unsimulated}."
        now = self.reference
        than = "now" if now.used else f"in {now.name} ({self.now.name}, as now, is not simulated)"
        more = best.gibibytes - now.gibibytes
        gain = f"{change}: a step takes {saved.percent} less time than {than}, {more:+.1f} GiB."
        return " ".join([gain, *self._memory()])

    def _why_nothing(self) -> Iterator[str]:
        """Why not overlap, and not another form that would be faster."""
        for form in self.forms:
            less = form.less_time(self.reference)
            ours = form.flags == "--commfuse-overlap"
            if form.used or (form.obstacle and not ours):
                continue
            title = form.name[0].upper() + form.name[1:]
            if ours and (form.obstacle or not less or less.typical == 0):
                yield f"{title}: {form.obstacle or form.remark}."
            elif less and (ours or less.typical > 0):
                few = ", too little for a change" * (less.typical > 0)
                few = few if form.fits else ", but it does not fit"
                yield f"{title}: {less.percent} less time{few}."

    def _memory(self) -> Iterator[str]:
        """A sentence if the best form does not fit, so that no form does."""
        if not self.best.fits:
            yield (
                f"By this estimate no form fits: it needs {self.best.gibibytes:.1f} GiB, and "
                f"{self.usable:.1f} GiB of an NPU are usable."
            )

    @cached_property
    def step(self) -> str:
        """What a step of the reference consists of, and its speed; empty if it is not simulated."""
        timed = self.reference.timed
        if not timed:
            return ""
        parts = TrainingStep(self.hardware.machine(), timed.training).breakdown(timed.form)
        words = [
            f"{_PARTS.get(name, f'{name.upper()} transfers')} {100 * seconds / timed.typical:.1f} %"
            for name, seconds in parts._asdict().items()
            if seconds or name == "host"
        ]
        return (
            f"A step in {self.reference.name}: {', '.join(words)}; "
            f"{timed.per_npu(timed.training.tokens):,.0f} tokens/s and "
            f"{timed.per_npu(timed.training.flops / 1e12):,.0f} TFLOP/s per NPU."
        )

    def __str__(self) -> str:
        total = self.hardware.typical("npu.hbm_bytes") / 2**30
        than = "now" if self.reference.used else self.reference.name
        lines = [
            f"{self.name}: {self.layout}, on {self.hardware.name}; "
            f"{self.usable:.1f} of {total:.0f} GiB of an NPU are usable",
            *(f"error: {problem}" for problem in self.problems),
            *(f"Note: {note}." for note in self.notes),
            "",
            table_row(("form", "ms", f"less time than {than}", "GiB", "note")),
            "|---|---:|---:|---:|---|",
            *(table_row(self._cells(form)) for form in self.forms),
            "",
            *filter(None, [self.step]),
            _LEGEND,
        ]
        refused = any(form.obstacle for form in self.forms if form.flags == "--use-commfuse")
        if self.layers and not refused:
            lines += ["", f"Layers with --use-commfuse, forward, per rank ({self.schedule}):"]
            lines += [f"  {layer}" for layer in self.layers]
        return "\n".join(lines)

    def _cells(self, form: Form) -> list[str]:
        time = memory = less = "-"
        if form.timed:
            time = f"{1e3 * form.timed.typical:,.0f}"
            memory = f"{form.gibibytes:.1f}{'' if form.fits else ', too much'}"
            saved = form.less_time(self.reference)
            if saved:
                less = "now" if form.used else saved.percent
        name = f"{form.name} (now)" if form.used else form.name
        remarks = "; ".join(filter(None, [form.change, form.obstacle or form.remark]))
        return [name, time, less, memory, remarks]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layout": self.layout,
            "verdict": self.verdict,
            "best": self.best.name,
            "saved": self.saved and self.saved._asdict(),
            "reference": self.reference.name,
            "step": self.step,
            "hardware": self.hardware.name,
            "usable_bytes": limit(self.hardware),
            "notes": self.notes,
            "problems": self.problems,
            "forms": [form.as_json(self.reference) for form in self.forms],
            "schedule": self.schedule,
            "layers": [layer._asdict() for layer in self.layers],
        }


def _layout(launch: AskedLaunch) -> str:
    """The parallel sizes of a launch."""
    config = launch.config
    return (
        f"TP {config.tensor_model_parallel_size}, PP {config.pipeline_model_parallel_size}, "
        f"CP {config.context_parallel_size}, EP {launch.expert_parallel}, "
        f"DP {config.data_parallel_size}"
        f"{', sequence parallel' if config.uses_sequence_parallel else ''}"
    )


def plan_launch(launch: AskedLaunch, hardware: Hardware) -> LaunchPlan:
    """Compare the forms in which a launch can run.

    Raises:
        PlanError: the options form no valid schedule.
    """
    # CommFuse would take the place of these overlaps.
    options = launch.options.copy()
    options.drop(*PEERS)
    against = obstacles(replace(launch, command=replace(launch.command, options=options)))
    # With --kv-channels the hidden size need not be divisible by the heads.
    may = "hidden size" if "--kv-channels" in options else "nothing"
    wrong = [line for line in problems(launch.config) if not line.startswith(may)]
    ordered = launch.command.environment.get("HCCL_DETERMINISTIC", "").lower()
    if ordered in ("true", "strict") or "--npu-deterministic" in launch.options:
        hardware = replace(hardware, deterministic=True)
    rows = {}
    unsimulated = wrong[0] if wrong else ""
    try:
        if not wrong:
            rows = simulate_forms(launch, training_of(launch), hardware, against)
    except PlanError:
        raise
    except ValueError as error:
        unsimulated = str(error)
    plan = LaunchPlan(
        launch.name,
        _layout(launch),
        tuple(forms_of(launch, rows, against, hardware, unsimulated)),
        hardware,
        (*launch.command.notes, *([] if unsimulated else roughly(launch.options)), *against.notes),
        tuple(wrong),
        unsimulated,
        "" if wrong else str(launch.schedule),
        () if wrong else tuple(against.layers),
    )
    if not rows or launch.config.tensor_model_parallel_size == 1 or launch.config.sequence_parallel:
        return plan
    return replace(plan, notes=(*plan.notes, *_with_sequence_parallelism(launch, hardware, plan)))


def _with_sequence_parallelism(
    launch: AskedLaunch, hardware: Hardware, plan: LaunchPlan
) -> Iterator[str]:
    """What ``--sequence-parallel`` would bring to a launch with tensor parallelism alone."""
    option = "--sequence-parallel"
    command = replace(launch.command, options=launch.options.copy())
    command.options.set(option)
    config = replace(launch.config, sequence_parallel=True)
    other = plan_launch(replace(launch, command=command, config=config), hardware)
    form = other.best
    if form.timed:
        yield (
            f"with {option} added and {form.name} a step takes {1e3 * form.seconds:,.0f} ms and "
            f"{form.gibibytes:.1f} GiB; the best form without it {1e3 * plan.best.seconds:,.0f} "
            f"ms and {plan.best.gibibytes:.1f} GiB"
        )
