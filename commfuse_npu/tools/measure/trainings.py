"""Ten iterations of a launch in each of its forms, each kept when it is over."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from typing import Any

from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.launch_script.bounded import last_lines, run_bounded
from commfuse_npu.tools.measure.deadline import Deadline
from commfuse_npu.tools.measure.folder import Folder
from commfuse_npu.tools.measure.forms import FORMS, ITERATIONS, Form, Launches
from commfuse_npu.tools.measure.steps import LAUNCH
from commfuse_npu.tools.measure.training_log import TrainingLog, read_log

__all__ = ["Training", "train", "trained"]


@dataclass(frozen=True)
class Training:
    """What came of a form.

    Attributes:
        log: what it printed; ``None`` if it failed.
        failed: why, the cause last; ``""`` if it did not.
    """

    form: Form
    log: TrainingLog | None
    failed: str = ""


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

    Of a form there are in the folder its figures (``launch_FORM.json``), what it printed
    (``launch_FORM.log``) and what system tests of MindSpeed-LLM compare with
    (``baseline_FORM.json``).

    Args:
        text: the launch, as it was asked for.
        deadline: of all of them.
        first: seconds for a form before one is trained.  Then the others have three times as long
            as it and three minutes: they are the same work, and none may take the time of all.
        limit: seconds for each form instead, if somebody knows better.

    Returns:
        the names of the forms that failed or were left out.
    """
    left = []
    longest: float | None = None
    folder.keep(LAUNCH, {"launch": text})
    for form in launches.forms:
        kept = folder.kept(_name(form))
        if kept is not None and kept["launch"] == text and "log" in kept:
            print(f"launch, {form.title}: kept")
            longest = max(longest or 0.0, kept["took seconds"])
            continue
        command = shlex.join(launches.commands[form.name])
        content: dict[str, Any] = {"launch": text, "command": command}
        if deadline.over:
            print(f"launch, {form.title}: left out, {deadline.minutes:g} minutes are over")
            folder.keep(_name(form), {**content, "failed": "left out, the time was over"})
            left.append(form.name)
            continue
        print(f"launch, {form.title}", flush=True)
        seconds = first if longest is None else min(first, 3 * longest + 180)
        start = time.monotonic()
        found = _train(form, launches, folder, deadline.limit(limit or seconds))
        took = time.monotonic() - start
        if found.log is None:
            folder.keep(_name(form), {**content, "failed": found.failed})
            said = found.failed.splitlines()
            print(f"launch, {form.title}: failed: {' '.join(said[:1] + said[-1:])}",
                  file=sys.stderr)  # fmt: skip
            left.append(form.name)
            continue
        longest = max(longest or 0.0, took)
        content["took seconds"] = round(took, 1)
        folder.keep(_name(form), {**content, "log": found.log.as_json()})
        write_json(folder.path / f"baseline_{form.name}.json", found.log.baseline(), indent=4)
        iterations = len(found.log.milliseconds)
        print(f"launch, {form.title}: {iterations} iterations, in {took:.0f} s", flush=True)
    return left


def trained(folder: Folder) -> list[Training]:
    """What is kept of the last launch, in the order of the forms."""
    found = []
    last = folder.kept(LAUNCH) or {}
    for form in FORMS:
        kept = folder.kept(_name(form))
        if kept is None or kept["launch"] != last.get("launch"):
            continue
        log = TrainingLog(**kept["log"]) if "log" in kept else None
        found.append(Training(form, log, kept.get("failed", "")))
    return found


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
    found = min(len(log.milliseconds), len(log.losses))
    if found < ITERATIONS:
        why = f"{found} of {ITERATIONS} iterations with a loss"
        return Training(form, None, _failure(why, path))
    return Training(form, log)


def _failure(why: str, log: Any) -> str:
    said = last_lines(log) if log.exists() else []
    return "\n".join((f"{why} ({log})", *said))
