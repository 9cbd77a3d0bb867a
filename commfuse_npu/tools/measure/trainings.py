"""Ten iterations of a launch in each of its forms, each kept when it is over."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.launch_script.bounded import last_lines, run_bounded
from commfuse_npu.tools.measure.figures import Range, quartiles
from commfuse_npu.tools.measure.folder import Deadline, Folder
from commfuse_npu.tools.measure.forms import FORMS, ITERATIONS, Form, Launches
from commfuse_npu.tools.measure.steps import LAUNCH

__all__ = ["BASELINE", "WARM_UP", "Training", "TrainingLog", "read_log", "train", "trained"]

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
    """What came of a form: its log, or ``None`` and why it failed, the cause last."""

    form: Form
    log: TrainingLog | None
    failed: str = ""

    @property
    def milliseconds(self) -> Range:
        """Quartiles of the iterations after :data:`WARM_UP`."""
        assert self.log is not None
        return quartiles(self.log.milliseconds[WARM_UP:])


def train(
    text: str,
    launches: Launches,
    folder: Folder,
    deadline: Deadline,
    *,
    first: float,
    limit: float | None = None,
) -> list[str]:
    """Train each form that is not kept, and keep it; a form that fails leaves the others.

    The folder gets a form's figures (``launch_FORM.json``), what it printed (``launch_FORM.log``)
    and what system tests of MindSpeed-LLM compare with (``baseline_FORM.json``).

    Args:
        text: the launch, as it was asked for.
        first: seconds for a form before one is trained.  Then the others have three times as long
            as it and three minutes: they are the same work, and none may take the time of all.
        limit: seconds for each form instead.

    Returns:
        the names of the forms that failed or were left out.
    """
    left = []
    longest = 0.0
    folder.keep(LAUNCH, {"launch": text})
    for form in launches.forms:
        kept = folder.kept(_name(form))
        if kept is not None and kept["launch"] == text and "log" in kept:
            print(f"launch, {form.title}: kept")
            longest = max(longest, kept["took seconds"])
            continue
        seconds = limit or (min(first, 3 * longest + 180) if longest else first)
        start = time.monotonic()
        if deadline.over:
            found = Training(form, None, f"left out, {deadline.minutes:g} minutes are over")
        else:
            print(f"launch, {form.title}", flush=True)
            found = _train(form, launches, folder, deadline.limit(seconds))
        took = time.monotonic() - start
        content = {"launch": text, "command": shlex.join(launches.commands[form.name])}
        if found.log is None:
            folder.keep(_name(form), {**content, "failed": found.failed})
            lines = found.failed.splitlines()
            why = " ".join(dict.fromkeys((lines[0], lines[-1])))
            print(f"launch, {form.title}: failed: {why}", file=sys.stderr)
            left.append(form.name)
            continue
        longest = max(longest, took)
        log = {"log": asdict(found.log), "took seconds": round(took, 1)}
        folder.keep(_name(form), {**content, **log})
        write_json(folder.path / f"baseline_{form.name}.json", found.log.baseline(), indent=4)
        print(f"launch, {form.title}: {found.milliseconds[1]:.1f} ms, in {took:.0f} s", flush=True)
    return left


def trained(folder: Folder) -> list[Training]:
    """What is kept of the last launch, in the order of the forms."""
    last = (folder.kept(LAUNCH) or {}).get("launch")
    stored = [(form, folder.kept(_name(form))) for form in FORMS]
    return [
        Training(
            form, TrainingLog(**kept["log"]) if "log" in kept else None, kept.get("failed", "")
        )
        for form, kept in stored
        if kept is not None and kept["launch"] == last
    ]


def _name(form: Form) -> str:
    return f"{LAUNCH}_{form.name}"


def _train(form: Form, launches: Launches, folder: Folder, limit: float) -> Training:
    path = folder.path / f"{_name(form)}.log"
    try:
        code = run_bounded(
            launches.commands[form.name],
            folder=launches.folder,
            environment=launches.environment,
            log=path,
            seconds=limit,
        )
    except TimeoutError as error:
        return Training(form, None, _failure(f"{error}; give more with --timeout", path))
    except OSError as error:
        return Training(form, None, _failure(str(error), path))
    if code:
        return Training(form, None, _failure(f"exit code {code}", path))
    log = read_log(path.read_text("utf-8", errors="replace"))
    if (found := min(len(log.milliseconds), len(log.losses))) < ITERATIONS:
        why = f"{found} of {ITERATIONS} iterations with a loss"
        return Training(form, None, _failure(why, path))
    return Training(form, log)


def _failure(why: str, log: Path) -> str:
    said: Sequence[str] = last_lines(log) if log.exists() else []
    return "\n".join((f"{why} ({log})", *said))
