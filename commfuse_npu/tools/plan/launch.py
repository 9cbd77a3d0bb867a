"""What each form of CommFuse, and of its rivals, would bring to one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.plan import PlanError
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.rivals import (
    FLAGS,
    in_plain_pipeline,
    layer_seconds,
    not_simulated,
)
from commfuse_npu.tools.markdown import table_row
from commfuse_npu.tools.simulate.variants import REFERENCE, TURNS

__all__ = ["Form", "LaunchPlan", "plan_launch"]


class Form(NamedTuple):
    """One way to run a launch.

    Attributes:
        flags: what the launch needs for it; empty for Megatron's own order.
        share: time of a layer, of that with blocking collectives; ``None``: not simulated.
        obstacle: why it cannot be launched so; empty if it can, as far as that is known here.
    """

    name: str
    flags: str
    share: float | None
    obstacle: str = ""


class LaunchPlan(NamedTuple):
    """The answer for one launch.

    Attributes:
        transfers: whether it has transfers of tensor, expert or context parallelism.
        not_simulated: why no form has a share; empty if they have.
        hardware: name of the described machine.
    """

    name: str
    layout: str
    transfers: bool
    forms: tuple[Form, ...]
    not_simulated: str
    hardware: str
    notes: tuple[str, ...]

    @property
    def best(self) -> Form | None:
        """The fastest form that can be launched; of ours the first if nothing is simulated."""
        possible = [form for form in self.forms if not form.obstacle]
        timed = [form for form in possible if form.share is not None]
        if timed:
            return min(timed, key=lambda form: form.share or 0.0)
        return next((form for form in possible if form.flags.startswith("--")), None)

    @property
    def verdict(self) -> str:
        best = self.best
        if best is None or not best.flags:
            why = {form.obstacle for form in self.forms if form.obstacle}
            return f"Nothing to add: {'; '.join(sorted(why)) or 'this order is the fastest'}."
        if best.share is None:
            return f"Add {best.flags}: {best.name}. How much it brings is not known."
        megatron = next(form.share for form in self.forms if not form.flags)
        assert megatron is not None
        return (
            f"Add {best.flags}: with {best.name} a layer takes {1 - best.share / megatron:.1%} "
            f"less time than in Megatron's order (simulated, {self.hardware}, typical figures)."
        )

    def __str__(self) -> str:
        has = "has" if self.transfers else "has no"
        lines = [self.verdict, "", f"{self.name}: {self.layout}"]
        lines.append(f"It {has} transfers of tensor, expert or context parallelism.")
        lines += [f"Note: {note}." for note in self.notes]
        if self.not_simulated:
            lines.append(f"Not simulated: {self.not_simulated}.")
        lines += ["", table_row(["form", "time of a layer", "flags", "cannot be launched so"])]
        lines.append("|---|---:|---|---|")
        for form in self.forms:
            share = "-" if form.share is None else f"{form.share:.1%}"
            lines.append(table_row([form.name, share, f"`{form.flags}`" if form.flags else "-",
                                    form.obstacle or "-"]))  # fmt: skip
        return "\n".join(
            [
                *lines,
                "",
                "Time: of that with blocking collectives, forward and backward. Overlap: with the "
                "micro-batches that have no partner in Megatron's order. Whether CoC and MC2 take "
                "this launch is not checked here.",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {
            "forms": [form._asdict() for form in self.forms],
            "verdict": self.verdict,
        }


def plan_launch(launch: Launch, hardware: Hardware) -> LaunchPlan:
    """Compare the forms in which a launch can run.

    Raises:
        PlanError: its options make no schedule.
    """
    judged, overlap = launch.judged, launch.judged.overlap
    reason = not_simulated(launch, hardware.machine().npus_per_node)
    seconds: dict[str, float] = {}
    if not reason:
        try:
            seconds = layer_seconds(launch, hardware, launch.schedule)
        except ValueError as error:
            if isinstance(error, PlanError):
                raise
            reason = str(error)

    def share(name: str, paired: float = 1.0) -> float | None:
        if not seconds:
            return None
        time = paired * seconds[name] + (1 - paired) * seconds["megatron"]
        return time / seconds[REFERENCE.name]

    left = [f"{one.layer} ({one.reason})" for one in judged.layers if one.state == "left"]
    turns, flag = FLAGS[TURNS.name]
    if in_plain_pipeline(launch):
        flag += " --commfuse-fb-overlap-memory"
    forms = [
        Form(FLAGS["megatron"][0], "", share("megatron")),
        Form(turns, flag, share(TURNS.name, overlap.paired or 0.0), overlap.obstacle),
        Form("fused layers", "--use-commfuse", share("commfuse"), "; ".join(
            f"{option}: {why}" for option, why in judged.refused.items())),
    ]  # fmt: skip
    forms += [
        Form(*FLAGS[name], share(name))
        for name in seconds
        if name in FLAGS and name not in ("megatron", TURNS.name)
    ]
    also = [name for name, why in judged.why_not.items() if not why and not judged.excluded]
    notes = [*judged.notes, *(f"{', '.join(left)} stay Megatron's" for _ in left[:1])]
    notes += [f"with --use-commfuse {', '.join(also)} can be given, too" for _ in also[:1]]
    if overlap.paired is not None:
        notes.append(f"{overlap.paired:.0%} of a stage's forwards have a partner")
    return LaunchPlan(
        launch.name,
        str(judged.layout),
        overlap.transfers,
        tuple(forms),
        reason,
        hardware.name,
        tuple(notes),
    )
