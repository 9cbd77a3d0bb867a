"""Ten iterations of a launch in one of its forms, and what they printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.launch_script.bounded import last_lines, run_bounded
from commfuse_npu.tools.measure.folder import Folder
from commfuse_npu.tools.measure.forms import FORMS, ITERATIONS, Form, Launches
from commfuse_npu.tools.measure.steps import LAUNCH
from commfuse_npu.tools.quartiles import Range, quartiles

__all__ = ["BASELINE", "WARM_UP", "Training", "TrainingError", "TrainingLog", "file_of",
           "limit_of", "read_log", "train", "trained"]  # fmt: skip

WARM_UP = 3
"""Iterations that do not count: buffers, connections and compiled kernels come with them."""
BASELINE = ("lm loss", "grad norm", "throughput", "time info", "memo info")
"""What a baseline of MindSpeed-LLM's system tests has a list of, one number per iteration."""

_ITERATION = re.compile(r"^(?:.*\])? *iteration +\d+/ *\d+ \|(.*)$", re.M)
_MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \| allocated: ([\d.]+) \| "
    r"max allocated: ([\d.]+)"
)
_PEAK = re.compile(r"^most memory taken of a device \(MB\): ([\d.]+)$", re.M)
_WEIGHTS = re.compile(r"^sha256 of all weights: (\w{64})$", re.M)
_FIELDS = {
    "losses": "lm loss",
    "grad_norms": "grad norm",
    "teraflops": "throughput per GPU (TFLOP/s/GPU)",
    "milliseconds": "elapsed time per iteration (ms)",
}


@dataclass
class TrainingLog:
    """What a training of MindSpeed-LLM 26.1.0, or the CPU pretraining alike, printed.

    Attributes:
        losses, grad_norms: of each iteration, as printed.
        teraflops: TFLOP/s per device.
        milliseconds: wall time.
        megabytes: by rank, allocated after the first iteration and the most until then.
        peak: megabytes of the fullest device at the end, with HCCL's buffers.
        weights: SHA-256 of the weights of all ranks at the end.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    teraflops: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    megabytes: list[tuple[int, float, float]] = field(default_factory=list)
    peak: float | None = None
    weights: str | None = None

    @property
    def steady(self) -> list[float]:
        """Milliseconds of the iterations after :data:`WARM_UP`."""
        return self.milliseconds[WARM_UP:]

    def baseline(self) -> dict[str, list[Any]]:
        """As ``tests/st/baseline_results`` of MindSpeed-LLM has it; ms, MB and TFLOP/s."""
        memory = [
            {"rank": rank, "allocated memory": now, "max allocated memory": most}
            | {"format": "megatron"}
            for rank, now, most in self.megabytes
        ]
        lists = self.losses, self.grad_norms, self.teraflops, self.milliseconds, memory
        return dict(zip(BASELINE, lists, strict=True))


def read_log(text: str) -> TrainingLog:
    """Read what a training printed: Megatron's line per iteration, memory, a hash."""
    log = TrainingLog()
    for line in _ITERATION.findall(text):
        said = dict(part.rpartition(":")[::2] for part in line.split("|"))
        values = {name.strip(): value for name, value in said.items()}
        for attribute, name in _FIELDS.items():
            if name in values:
                getattr(log, attribute).append(float(values[name]))
    found = {int(rank): (float(now), float(most)) for rank, now, most in _MEMORY.findall(text)}
    log.megabytes = [(rank, *found[rank]) for rank in sorted(found)]
    log.peak = next(map(float, reversed(_PEAK.findall(text))), None)
    log.weights = next(reversed(_WEIGHTS.findall(text)), None)
    return log


class Training(NamedTuple):
    """What came of a form: its log, or why it failed, the cause last."""

    form: Form
    log: TrainingLog
    failed: str = ""

    @property
    def milliseconds(self) -> Range:
        """Quartiles of the iterations after :data:`WARM_UP`."""
        return quartiles(self.log.steady)


class TrainingError(Exception):
    """A form could not be trained: why, and what it printed last."""


def limit_of(longest: float, first: float) -> float:
    """Seconds for a form: ``first`` before one is trained.

    Then the others have three times as long as it and three minutes: they are the same work, and
    none may take the time of all.
    """
    return min(first, 3 * longest + 180) if longest else first


def train(form: Form, launches: Launches, folder: Folder, limit: float) -> TrainingLog:
    """Train a form.

    The folder gets what it printed (``launch_FORM.log``) and what system tests of MindSpeed-LLM
    compare with (``baseline_FORM.json``).

    Args:
        limit: seconds.

    Raises:
        TrainingError: it failed, or took longer.
    """
    path, why = folder.path / f"{file_of(form)}.log", ""
    try:
        code = run_bounded(
            launches.commands[form.name],
            folder=launches.folder,
            environment=launches.environment,
            log=path,
            seconds=limit,
        )
        why = f"exit code {code}" if code else ""
    except TimeoutError as error:
        why = f"{error}; give more with --timeout"
    except OSError as error:
        why = str(error)
    log = TrainingLog() if why else read_log(path.read_text("utf-8", errors="replace"))
    if not why and (found := min(len(log.milliseconds), len(log.losses))) < ITERATIONS:
        why = f"{found} of {ITERATIONS} iterations with a loss"
    if why:
        printed: Sequence[str] = last_lines(path) if path.exists() else []
        raise TrainingError("\n".join((f"{why} ({path})", *printed)))
    write_json(folder.path / f"baseline_{form.name}.json", log.baseline(), indent=4)
    return log


def trained(folder: Folder) -> list[Training]:
    """What is kept of the last launch, in the order of the forms."""
    last = (folder.kept(LAUNCH) or {}).get("launch")
    return [
        Training(form, TrainingLog(**kept.get("log", {})), kept.get("failed", ""))
        for form in FORMS
        if (kept := folder.kept(file_of(form))) is not None and kept["launch"] == last
    ]


def file_of(form: Form) -> str:
    """The name of a form's files in the folder."""
    return f"{LAUNCH}_{form.name}"
