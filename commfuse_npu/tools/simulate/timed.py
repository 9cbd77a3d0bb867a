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
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant
from commfuse_npu.tools.terminal import table_row

_ENDS: tuple[Choice, Choice] = "favorable", "unfavorable"
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

    def text(self, show: Callable[[float], str]) -> str:
        """``typical (low .. high)``."""
        if self.low == self.high:
            return show(self.typical)
        return f"{show(self.typical)} ({show(self.low)} .. {show(self.high)})"


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
        """``22.13 s (15.34 s .. 36.17 s)``."""
        return Range.of(self.seconds).text(_show)

    @property
    def _sizes(self) -> dict[str, str]:
        """Parallel sizes; of stages also the chunks of each if they are interleaved."""
        tp, cp, dp, pp, vpp = self.training.layout
        return {"TP": f"{tp}", "CP": f"{cp}", "PP": f"{pp} x {vpp}" if vpp > 1 else f"{pp}",
                "DP": f"{dp}"}  # fmt: skip

    @property
    def name(self) -> str:
        """Layout and form."""
        layout = [f"{name} {size}" for name, size in self._sizes.items()]
        recomputed = ["full recomputation"] * self.training.recomputes
        return ", ".join([*layout, *recomputed, self.form.name])

    def row(self, first: Timed) -> dict[str, str]:
        """The cells of a table by column, beside those of the ``first``, which is bold."""
        mark = "**"
        longer = "-"
        if self is not first:
            pairs = list(zip(self.seconds, first.seconds, strict=True))
            slower = f"{sum(ours > theirs for ours, theirs in pairs)} of {len(pairs)}"
            mark = ""
            longer = f"{self.typical / first.typical - 1:+.1%} ({slower})"
        model = self.training.model
        tokens = model.seq_length * model.global_batch_size / self.training.layout.npus
        return {
            **self._sizes,
            "recompute": "full" if self.training.recomputes else "none",
            "form": f"{mark}{self.form.name}{mark}",
            "step": self.step,
            "longer (machines)": longer,
            "tokens/s/NPU": Range.of([tokens / s for s in self.seconds]).text("{:.0f}".format),
            "memory of an NPU": f"{self.memory.total / 2**30:.1f} GiB"
            + ("" if self.fits else ", too much"),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.training.layout._asdict(),
            "sequence": self.training.model.seq_length,
            "micro_batches": self.training.micro_batches,
            "recompute": "full" if self.training.recomputes else "none",
            "form": self.form.name,
            "flags": None if self.form.flags is None else self.form.flags.split(),
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
    """The shortest step that a launch can have; first of what fits."""
    launched = (row for row in rows if row.form.flags is not None)
    return min(launched, key=lambda row: (not row.fits, row.typical))


def table(rows: Sequence[Timed]) -> str:
    """A Markdown table; :func:`best` is bold."""
    cells = [row.row(best(rows)) for row in rows]
    lines = [table_row(cells[0]), "|---:|---:|---:|---:|---|---|---:|---:|---:|---:|"]
    return "\n".join([*lines, *(table_row(row.values()) for row in cells)])


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
    none = (
        f"No form fits {limit(hardware) / 2**30:.1f} GiB ({USABLE:.0%} of an NPU): choose larger "
        "sizes or full recomputation. The shortest"
    )
    verdict = "Recommended" if first.fits else none
    share = ratio(first.training, hardware, len(first.seconds)).text("{:.2f}".format)
    sizes = first.memory._asdict().items()
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in sizes)
    tokens = first.training.model.seq_length
    npus = first.training.layout.npus
    title = f"{model}, {tokens} tokens, {npus} NPUs"
    print(
        f"{verdict}: {first.name}, a step in {first.step}.",
        "",
        f"- Communication / computation of a layer, plain: {share}.",
        f"- Memory of the fullest NPU, GiB: {parts}.",
        "",
        launch,
        "",
        f"{title} of {hardware.name}. Simulated, not measured. {hardware.assumed} of "
        f"{hardware.path.name} have no public source at all; ranges are over its uncertainty.",
        "",
        table(rows),
        sep="\n",
    )
    return title


def _show(value: float) -> str:
    """``22.13 s``, ``940.1 ms``."""
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.1f} ms"
