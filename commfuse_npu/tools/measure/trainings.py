"""Trains ten iterations of a launch in one of its forms, and reads its output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.launch_script.bounded import last_lines, run_bounded
from commfuse_npu.tools.measure.launches import ITERATIONS, Form, Launches
from commfuse_npu.tools.quartiles import Range, quartiles

__all__ = ["WARM_UP", "Training", "TrainingError", "TrainingLog", "limit_of", "read_log", "train"]

WARM_UP = 3
"""Iterations that do not count: they create buffers and connections and compile kernels."""

_ITERATION = re.compile(r"^(?:.*\])? *iteration +\d+/ *\d+ \|(.*)$", re.M)
_PEAK = re.compile(r"^most memory taken of a device \(MB\): ([\d.]+)$", re.M)
_WEIGHTS = re.compile(r"^sha256 of all weights: (\w{64})$", re.M)
_FIELDS = {"losses": "lm loss", "milliseconds": "elapsed time per iteration (ms)"}


@dataclass
class TrainingLog:
    """The output of a training with MindSpeed-LLM 26.1.0, or of the CPU pretraining.

    Attributes:
        losses: of each iteration, as printed.
        milliseconds: wall time of each iteration.
        peak: megabytes used on the fullest device at the end, including HCCL's buffers.
        weights: SHA-256 of the weights of all ranks at the end.
    """

    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    peak: float | None = None
    weights: str | None = None

    @property
    def steady(self) -> list[float]:
        """Milliseconds of the iterations after :data:`WARM_UP`."""
        return self.milliseconds[WARM_UP:]


def read_log(text: str) -> TrainingLog:
    """Parse a training's output: Megatron's line per iteration, memory, a hash."""
    log = TrainingLog()
    for line in _ITERATION.findall(text):
        fields = dict(part.rpartition(":")[::2] for part in line.split("|"))
        values = {name.strip(): value for name, value in fields.items()}
        for attribute, name in _FIELDS.items():
            if name in values:
                getattr(log, attribute).append(float(values[name]))
    log.peak = next(map(float, reversed(_PEAK.findall(text))), None)
    log.weights = next(reversed(_WEIGHTS.findall(text)), None)
    return log


class Training(NamedTuple):
    """The result of a form: its log, or why it failed, with the cause last."""

    form: Form
    log: TrainingLog
    failed: str = ""

    @property
    def milliseconds(self) -> Range:
        """Quartiles of the iterations after :data:`WARM_UP`."""
        return quartiles(self.log.steady)


class TrainingError(Exception):
    """A form could not be trained; the message has the reason and its last output."""


def limit_of(longest: float, first: float) -> float:
    """Time limit of a form: ``first`` for the first one, later 3 x the longest + 3 minutes.

    All forms do the same work, and none may use up the time of the others.
    """
    return min(first, 3 * longest + 180) if longest else first


def train(form: Form, launches: Launches, folder: Path, limit: float) -> TrainingLog:
    """Train a form; its output is written to ``launch_FORM.log`` in the folder.

    Args:
        limit: seconds.

    Raises:
        TrainingError: it failed, or exceeded the limit.
    """
    path, log = folder / f"{form.step}.log", TrainingLog()
    try:
        code = run_bounded(
            launches.commands[form.name],
            folder=launches.folder,
            environment=launches.environment,
            log=path,
            seconds=limit,
        )
        if code:
            raise ChildProcessError(f"exit code {code}")
        log = read_log(path.read_text("utf-8", errors="replace"))
        if (count := min(len(log.milliseconds), len(log.losses))) < ITERATIONS:
            raise ChildProcessError(f"{count} of {ITERATIONS} iterations with a loss")
    except OSError as error:
        why = f"{error}; give more with --timeout" if isinstance(error, TimeoutError) else error
        printed: Sequence[str] = last_lines(path) if path.exists() else []
        raise TrainingError("\n".join((f"{why} ({path})", *printed))) from error
    return log
