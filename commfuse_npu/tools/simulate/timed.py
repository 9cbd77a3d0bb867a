"""A training in a form with its time and memory: its row, and what rows say together.

Five machines are simulated for a description: one with all typical figures, and the four
combinations of favorable and unfavorable figures for computation and communication.  A range spans
the results of these five; it is wide where the figures are uncertain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from commfuse_npu.tools.hardware.description import Choice, Hardware
from commfuse_npu.tools.simulate.footprint import USABLE, Footprint, footprint, limit
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, LEGEND, MEGATRON, REFERENCE, Variant
from commfuse_npu.tools.terminal import table_row

_ENDS: tuple[Choice, Choice] = "favorable", "unfavorable"
_LITTLE = 0.01
"""Share of a step that a further option has to save."""
_LAYOUT = "TP CP PP DP"
_SAME = (_LAYOUT, "recompute")
"""Columns that are left out where all rows have the same."""
CORNERS: tuple[tuple[Choice, Choice], ...] = ("typical", "typical"), *product(_ENDS, _ENDS)
"""The choice of figures of each machine: for computation, and for links."""


class Range(NamedTuple):
    """The result at typical figures, and the lowest and highest result of the five machines."""

    low: float
    typical: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """The range of one value per machine, the typical one first."""
        return cls(min(values), values[0], max(values))

    def text(self, show: Callable[[float], str], unit: str = "") -> str:
        """``typical unit (low to high)``."""
        typical, low, high = map(show, (self.typical, self.low, self.high))
        return f"{typical}{unit}" if low == high else f"{typical}{unit} ({low} to {high})"

    @property
    def percent(self) -> str:
        """``21.6 % (15.0 to 25.1)``."""
        # Zero has no sign.
        return self.text(lambda part: f"{round(100 * part, 1) + 0.0:.1f}", " %")


@dataclass(frozen=True)
class Timed:
    """A training in a form, simulated.

    Attributes:
        seconds: of a step on each machine, the typical one first.
        memory: of the fullest NPU.
        fits: whether an NPU has that memory.
    """

    training: Training
    form: Variant
    seconds: tuple[float, ...]
    memory: Footprint
    fits: bool = True

    @property
    def typical(self) -> float:
        return self.seconds[0]

    @property
    def step(self) -> str:
        """``22.13 s (15.34 to 36.17)``, or milliseconds."""
        times = Range.of(self.seconds)
        if times.typical >= 1:
            return times.text("{:.2f}".format, " s")
        return times.text(lambda seconds: f"{1e3 * seconds:.1f}", " ms")

    @property
    def _sizes(self) -> list[str]:
        """TP, CP, PP and DP; of stages also the chunks of each if they are interleaved."""
        tp, cp, dp, pp, vpp = self.training.layout
        return [f"{tp}", f"{cp}", f"{pp}x{vpp}" if vpp > 1 else f"{pp}", f"{dp}"]

    @property
    def name(self) -> str:
        """Layout and form."""
        layout = [" ".join(pair) for pair in zip(_LAYOUT.split(), self._sizes, strict=True)]
        recomputed = ["full recomputation"] * self.training.recomputes
        return ", ".join([*layout, *recomputed, self.form.name])

    def less_time(self, than: Timed) -> Range:
        """Share of another step that this one saves."""
        pairs = zip(self.seconds, than.seconds, strict=True)
        return Range.of([1 - mine / other for mine, other in pairs])

    def per_npu(self, number: float) -> float:
        """A number of the whole step, per second and NPU."""
        return number / self.typical / self.training.layout.npus

    def row(self, first: Timed, reference: Timed) -> dict[str, str]:
        """The cells of a table by column: the ``first`` is bold, the ``reference`` the one that
        others save time against."""
        mark = "**" if self is first else ""
        return {
            _LAYOUT: " ".join(self._sizes),
            "recompute": "full" if self.training.recomputes else "none",
            "form": f"{mark}{self.form.name}{mark}",
            "step": self.step,
            "less time": "reference" if self is reference else self.less_time(reference).percent,
            "tokens/s": f"{self.per_npu(self.training.tokens):,.0f}",
            "GiB": f"{self.memory.total / 2**30:.1f}" + ("" if self.fits else ", too much"),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.training.layout._asdict(),
            "sequence": self.training.model.seq_length,
            "micro_batches": self.training.micro_batches,
            "recompute": "full" if self.training.recomputes else "none",
            "form": self.form.name,
            "flags": self.form.flags.split() if self.form.launched else None,
            "step": Range.of(self.seconds)._asdict(),
            "memory_bytes": self.memory.total,
            "fits": self.fits,
        }


def timed(training: Training, form: Variant, hardware: Hardware, corners: int = 5) -> Timed:
    """Simulate a training in a form, on the first ``corners`` machines of a description.

    Raises:
        ValueError: a group does not fit the machine's nodes.
    """
    steps = [TrainingStep(hardware.machine(*corner), training) for corner in CORNERS[:corners]]
    seconds = tuple(step.time(form) for step in steps)
    memory = footprint(training, form, hardware)
    return Timed(training, form, seconds, memory, memory.total <= limit(hardware))


def best(rows: Sequence[Timed]) -> Timed:
    """The shortest step that a launch can have; first of what fits.

    It has to save a hundredth beside each with a part of its flags in the same layout.
    """
    launched = sorted(
        (row for row in rows if row.form.launched),
        key=lambda row: (not row.fits, row.typical),
    )

    def worth(row: Timed) -> bool:
        fewer = (
            other
            for other in launched
            if other.fits == row.fits and other.training.layout == row.training.layout
            if has_more(row.form.flags, other.form.flags)
        )
        return all(saves(row.typical, other.typical) for other in fewer)

    return next(filter(worth, launched))


def saves(seconds: float, than: float) -> bool:
    """Whether one step saves at least :data:`_LITTLE` of another."""
    return seconds <= (1 - _LITTLE) * than


def has_more(flags: str, than: str) -> bool:
    """Whether flags are some others and more."""
    return set() < {*than.split()} < {*flags.split()}


def table(rows: Sequence[Timed]) -> str:
    """A Markdown table, shortest step first; :func:`best` is bold.

    Time is saved against Megatron's order, else against the shortest step without CommFuse.
    """
    order = sorted(rows, key=lambda row: (not row.fits, row.typical))
    launched = [row for row in order if row.form.launched]
    others = [row for row in launched if not row.form.ours] or launched
    reference = next((row for row in others if row.form is MEGATRON), others[0])
    cells = [row.row(best(rows), reference) for row in order]
    same = {name for name in _SAME if len({row[name] for row in cells}) == 1}
    names = [name for name in cells[0] if name not in same]
    lines = [table_row(names), f"|{'---|' * (len(names) - 4)}{'---:|' * 4}"]
    return "\n".join([*lines, *(table_row(row[name] for name in names) for row in cells)])


def ratio(training: Training, hardware: Hardware, corners: int = 5) -> Range:
    """Communication / computation of a layer, with plain collectives."""
    steps = [TrainingStep(hardware.machine(*corner), training) for corner in CORNERS[:corners]]
    layers = [[s.layer_time(form).seconds for form in (REFERENCE, COMPUTE_ONLY)] for s in steps]
    return Range.of([plain / bound - 1 for plain, bound in layers])


def as_json(rows: Sequence[Timed], hardware: Hardware, model: str) -> dict[str, Any]:
    """The rows, and what they were simulated with."""
    first = best(rows)
    return {
        "simulated": True,
        "model": model,
        "hardware": {
            "file": str(hardware.path),
            "name": hardware.name,
            "deterministic": hardware.deterministic,
            "figures": {name: vars(figure) for name, figure in hardware.figures.items()},
        },
        "ratio": ratio(first.training, hardware, len(first.seconds))._asdict(),
        "recommended": first.as_json(),
        "forms": [row.as_json() for row in rows],
    }


def show(rows: Sequence[Timed], hardware: Hardware, model: str, launch: str) -> str:
    """Print the verdict, how to launch it, what it is based on, and the table.

    Returns:
        What was simulated: model, sequence length and number of NPUs.
    """
    first = best(rows)
    job = first.training
    none = (
        f"No form fits {limit(hardware) / 2**30:.1f} GiB ({USABLE:.0%} of an NPU): choose larger "
        "sizes or full recomputation. The shortest"
    )
    verdict = "Recommended" if first.fits else none
    share = ratio(job, hardware, len(first.seconds)).text("{:.2f}".format)
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in first.memory._asdict().items())
    title = f"{model}, {job.model.seq_length} tokens, {job.layout.npus} NPUs"
    print(
        f"{verdict}: {first.name}, a step in {first.step}.\n\n"
        f"- Communication / computation of a layer, plain: {share}.\n"
        f"- Memory of the fullest NPU, GiB: {parts}.\n\n{launch}\n\n"
        f"{title} of {hardware.name}. Simulated, not measured. {hardware.assumed} of "
        f"{hardware.path.name} have no public source at all; ranges are over its uncertainty. "
        f"Less time: than the reference. Tokens/s: per NPU. {LEGEND}\n\n{table(rows)}"
    )
    return title
