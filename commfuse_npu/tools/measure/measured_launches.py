"""The forms in which a launch is measured: their commands, and what their trainings print.

For MindSpeed-LLM, options are read from what its script would start
(:mod:`commfuse_npu.tools.launch_script`), so any launch script works, and each form is the same
command with its own flags.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.launch_script.read_launch import read_launch
from commfuse_npu.tools.launch_script.short_run import (
    PEERS,
    commfuse_names,
    last_lines,
    replace_missing_data,
    run_bounded,
    shorten,
    torchrun_here,
)
from commfuse_npu.tools.quartiles import Range, quartiles
from commfuse_npu.tools.simulate.variants import (
    COC,
    COC_FUSED,
    FUSED,
    MC2,
    MEGATRON,
    OVERLAP,
    REFERENCE,
    Variant,
)

ITERATIONS = 10
"""Iterations of each form."""
WARM_UP = 3
"""Iterations that do not count: they create buffers and connections and compile kernels."""

_PROJECT = Path(__file__).resolve().parents[3]


_FUSED = Variant(FUSED, "fused", flags="--use-commfuse")
FORMS = {
    "launch_megatron": MEGATRON,
    "launch_fb_overlap": OVERLAP,
    "launch_commfuse": _FUSED,
    "launch_mc2": MC2,
    "launch_coc_kernel": COC_FUSED,
    "launch_plain": REFERENCE,
    "launch_coc": COC[1],
}
"""The forms, the most useful first, by their names among the results and in those of logs."""


class Launches(NamedTuple):
    """Commands by the names of :data:`FORMS`, the folder in which they run, their environment.

    ``notes``: what was changed in the launch.
    """

    commands: Mapping[str, Sequence[str]]
    folder: Path
    environment: Mapping[str, str]
    notes: Sequence[str] = ()


def launches(text: str, ranks: int) -> Launches:
    """The commands for ``--launch``, one of MindSpeed-LLM.  Rehearsed on CPU, not run on NPUs.

    A number of processes that the launch counts on its machine is ``ranks``.

    Raises:
        UsageError: it is not a launch, or not for this number of ranks.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--launch {text!r}: {error}; quote it as for a shell") from error
    checkout = Path(os.environ.get("MINDSPEED_LLM_HOME") or Path.cwd())
    launch = read_launch(words, checkout, per_node=ranks)
    if launch.processes != ranks:
        text = f"asks for {launch.processes} processes" if launch.processes else "names no number"
        raise UsageError(
            f"--launch {words[0]} {text}, and here are {ranks} (--ranks); a measurement is of "
            "one server: change the launch or --ranks"
        )
    folder, script = launch.located(checkout)
    options = launch.options
    shorten(options, ITERATIONS)
    options.set("--log-throughput")
    replace_missing_data(options, folder)
    started = [*torchrun_here(ranks), "-m", "mindspeed_patches.measured"]
    commands = {}
    for name, form in FORMS.items():
        blocking = ["--blocking"] if form is REFERENCE else []
        commands[name] = [*started, *blocking, str(script), *_in_form(options, form)]
    environment = {**os.environ, **launch.environment}
    paths = [str(_PROJECT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return Launches(commands, folder, environment, (*launch.notes, *options.changes))


def _in_form(options: Options, form: Variant) -> list[str]:
    result = options.copy()
    result.drop(*PEERS, "--use-commfuse", "--no-use-commfuse")
    if form is not _FUSED:
        result.drop(*commfuse_names(result))
    if form is OVERLAP:
        result.set("--commfuse-overlap-memory")  # required in a plain pipeline
    return [*result.words, *form.flags.split()]


# ------------------------------------------------------------------- trainings

_ITERATION = re.compile(r"^(?:.*\])? *iteration +\d+/ *\d+ \|(.*)$", re.M)
_FIELDS = {
    "losses": re.compile(r"\| lm loss: ([^|]+)"),
    "milliseconds": re.compile(r"elapsed time per iteration \(ms\): ([^|]+)"),
}
_PEAK = re.compile(r"^most memory taken of a device \(MB\): ([\d.]+)$", re.M)
_WEIGHTS = re.compile(r"^sha256 of all weights: (\w{64})$", re.M)


@dataclass
class MeasuredTraining:
    """A form of a launch, and what its output says, or why it failed.

    Attributes:
        losses: of each iteration, as printed.
        milliseconds: wall time of each iteration.
        peak: megabytes used on the fullest device at the end, including HCCL's buffers.
        weights: SHA-256 of the weights of all ranks at the end.
        failed: the reason, with the cause last.
    """

    form: Variant
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    peak: float | None = None
    weights: str | None = None
    failed: str = ""

    @property
    def steady(self) -> Range:
        """Quartiles of the milliseconds of the iterations after :data:`WARM_UP`."""
        return quartiles(self.milliseconds[WARM_UP:])


def read_log(text: str) -> dict[str, Any]:
    """The figures of a :class:`MeasuredTraining`, from the output of MindSpeed-LLM 26.1.0."""
    lines = _ITERATION.findall(text)
    matches = {name: map(field.search, lines) for name, field in _FIELDS.items()}
    log: dict[str, Any] = {n: [float(m[1]) for m in found if m] for n, found in matches.items()}
    log["peak"] = next(map(float, reversed(_PEAK.findall(text))), None)
    log["weights"] = next(reversed(_WEIGHTS.findall(text)), None)
    return log


class TrainingError(Exception):
    """A form could not be trained; the message has the reason and its last output."""


def train(name: str, launches: Launches, folder: Path, limit: float) -> dict[str, Any]:
    """Train a form, with its output in ``NAME.log``; returns its :func:`read_log`.

    Raises:
        TrainingError: it failed, or exceeded the limit of seconds.
    """
    path = folder / f"{name}.log"
    try:
        code = run_bounded(
            launches.commands[name],
            folder=launches.folder,
            environment=launches.environment,
            log=path,
            seconds=limit,
        )
        if code:
            raise ChildProcessError(f"exit code {code}")
        log = read_log(path.read_text("utf-8", errors="replace"))
        if (count := min(len(log["milliseconds"]), len(log["losses"]))) < ITERATIONS:
            raise ChildProcessError(f"{count} of {ITERATIONS} iterations with a loss")
    except OSError as error:
        why = f"{error}; give more with --timeout" if isinstance(error, TimeoutError) else error
        printed = last_lines(path) if path.exists() else []
        raise TrainingError("\n".join((f"{why} ({path})", *printed))) from error
    return log
