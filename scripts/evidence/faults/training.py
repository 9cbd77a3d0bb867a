"""Whole trainings with an accident: how they end, what is left, and whether they can go on.

An undisturbed training, one with the accident from the same seed, and one that resumes from the
checkpoint that the accident left.  The last has to give the losses of the first, all digits, and
the same SHA-256 over all weights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.evidence.faults import left_over
from scripts.evidence.faults.finding import Finding
from scripts.evidence.faults.judge import MARGIN_SECONDS, cause, names_peer, names_step, short
from scripts.evidence.faults.pretraining import Accident, environment

__all__ = ["Course", "Disturbed", "Ended", "accidents", "play_trainings", "problems"]

_ROOT = Path(__file__).resolve().parents[3]
_LIMIT_SECONDS = 150.0
_END_SECONDS = 30.0
"""From the accident to the end of the launcher, which gives the other ranks time to end."""

_SAVED, _LAST = 3, 6
_TINY = (
    "--fp32 --num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
    f"--train-iters {_LAST} --lr-warmup-iters 1 --eval-interval 0 --save-interval {_SAVED} "
    "--distributed-timeout-minutes 1"
).split()
_TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2")
_DATA_PARALLEL = (
    *("--tensor-model-parallel-size", "1", "--data-parallel-size", "2"),
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--commfuse-dp"),
)


@dataclass(frozen=True)
class Disturbed:
    """A row: an accident in a training.

    Attributes:
        sends: see :class:`~scripts.evidence.faults.pretraining.Accident`.
    """

    fault: str
    where: str
    sends: str | None
    layout: tuple[str, ...]
    iteration: int = 5
    quick: bool = False

    @property
    def name(self) -> str:
        return f"training/{self.fault}/{self.where}".replace(" ", "_")


@dataclass(frozen=True)
class Ended:
    """How a training ended.

    Attributes:
        exit_code: of the launcher; ``None`` if it had to be killed.
        losses: of the metrics file, by iteration.
        weights: SHA-256 over all of them; empty if it did not get there.
        after: seconds from the accident to the end of the launcher.
        left: command lines of processes that had to be killed afterwards.
    """

    exit_code: int | None
    output: str
    losses: dict[int, float]
    weights: str
    after: float | None
    left: tuple[str, ...]


@dataclass(frozen=True)
class Course:
    """The three trainings of a row.

    Attributes:
        checkpoint: the iteration of the last checkpoint that the accident left, from the tracker.
    """

    row: Disturbed
    whole: Ended
    broken: Ended
    checkpoint: str
    resumed: Ended


def accidents(*, quick: bool) -> list[Disturbed]:
    """All rows, or the short table's."""
    tensor, data = _TENSOR_PARALLEL, _DATA_PARALLEL
    rows = [
        Disturbed(
            "killed",
            "TP 2, backward of iteration 5",
            "all_gather_linear backward",
            tensor,
            quick=True,
        ),
        Disturbed("user error", "TP 2, forward of iteration 5", "linear_reduce_scatter", tensor),
        Disturbed("killed", "TP 2, writing the checkpoint of iteration 6", None, tensor, _LAST),
        Disturbed("killed", "DP 2, gradients of iteration 5", "reduce_scatter_bucket", data),
    ]
    return [row for row in rows if row.quick or not quick]


def play_trainings(rows: Sequence[Disturbed]) -> Iterator[Finding]:
    """One row after the other; an undisturbed training serves all rows of its layout."""
    with tempfile.TemporaryDirectory(prefix="commfuse-faults-") as name:
        whole: dict[tuple[str, ...], Ended] = {}
        for number, row in enumerate(rows):
            if row.layout not in whole:
                folder = Path(name) / f"whole-{len(whole)}"
                whole[row.layout] = _train(folder, row.layout)
            folder = Path(name) / f"row-{number}"
            accident = Accident(row.fault, 1, row.iteration, row.sends, f"{folder}.time")
            broken = _train(folder, row.layout, accident=accident)
            tracker = folder / "llama_tiny/checkpoints/latest_checkpointed_iteration.txt"
            checkpoint = tracker.read_text().strip() if tracker.exists() else "none"
            resumed = _train(folder, (*row.layout, "--resume"))
            yield _finding(Course(row, whole[row.layout], broken, checkpoint, resumed))


def problems(course: Course) -> list[str]:
    """What is wrong with a row; nothing if all is as it has to be."""
    found = [f"left over: {command}" for command in course.broken.left]
    if course.whole.exit_code != 0:
        found.append(f"the undisturbed training ended with {course.whole.exit_code}")
    if course.broken.exit_code is None:
        found.append("it hung and was killed")
    elif course.broken.exit_code == 0:
        found.append("its exit code is 0")
    limit = _END_SECONDS + MARGIN_SECONDS
    if course.broken.after is None:
        found.append("the accident did not happen")
    elif course.broken.after > limit:
        found.append(f"it ended {course.broken.after:.1f} s after the accident; at most {limit:g}")
    errors = _errors(course.broken.output)
    kind, text = errors.get(0, ("", ""))
    if not kind:
        found.append("rank 0, which survived, raised nothing")
    # Writing a checkpoint ends in a plain collective, which knows of no steps.
    elif course.row.sends is not None and not (
        kind == "TransportError" and names_step(text) and names_peer(text, 0)
    ):
        found.append(f"rank 0 did not name step and peer: {kind}: {text}")
    if course.row.fault == "user error" and errors.get(1, ("",))[0] != "UserError":
        found.append("rank 1 did not end with its own error")
    if course.checkpoint != str(_SAVED):
        found.append(f"the last checkpoint is {course.checkpoint} instead of {_SAVED}")
    if course.resumed.exit_code != 0:
        found.append(f"resuming ended with {course.resumed.exit_code}: {course.resumed.output}")
    elif len(course.whole.losses) != _LAST or course.resumed.losses != course.whole.losses:
        found.append(f"losses {course.resumed.losses} instead of {course.whole.losses}")
    elif course.resumed.weights != course.whole.weights or not course.whole.weights:
        found.append("the weights are not those of the undisturbed training")
    return found


def _finding(course: Course) -> Finding:
    row = course.row
    lines = [
        f"{rank}: {kind}: {short(text, rank) if kind == 'TransportError' else cause(text) or text}"
        for rank, (kind, text) in sorted(_errors(course.broken.output).items())
    ]
    if course.broken.after is not None:
        lines.append(f"launcher: exit code {course.broken.exit_code}, {course.broken.after:.2f} s")
    lines.append(f"checkpoint of iteration {course.checkpoint}")
    same = course.resumed.losses == course.whole.losses
    lines.append(f"resumed: losses {'those' if same else '**not** those'} of the undisturbed run")
    found = tuple(problems(course))
    return Finding(row.name, row.fault, f"training, {row.where}", 2, tuple(lines), found)


def _errors(output: str) -> dict[int, tuple[str, str]]:
    """Kind and message of the error that each rank ended with, from the output of all ranks."""
    pattern = r"^\[rank(\d+)\]: (?:[\w.]+\.)?(\w*(?:Error|Exception)): (.*)$"
    found = re.findall(pattern, output, re.MULTILINE)
    return {int(rank): (kind, text) for rank, kind, text in found}


def _train(folder: Path, options: Sequence[str], *, accident: Accident | None = None) -> Ended:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "scripts.evidence.faults.pretraining", *_TINY, *options),
            *("--runs-dir", str(folder)),
        ],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", left_over.MARK: mark, **environment(accident)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    code: int | None
    try:
        output, _ = process.communicate(timeout=_LIMIT_SECONDS)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        code = None
    ended = time.monotonic()
    left = left_over.end(mark, besides=set())
    if code is None:
        output, _ = process.communicate()
    happened = Path(accident.file) if accident is not None else None
    after = None
    if happened is not None and happened.exists():
        after = ended - float(happened.read_text(encoding="utf-8"))
    weights = re.search(r"^sha256 of all weights: (\w{64})$", output, re.MULTILINE)
    return Ended(
        code, output, _losses(folder / "llama_tiny/metrics.jsonl"), weights[1] if weights else "",
        after, left,
    )  # fmt: skip


def _losses(path: Path) -> dict[int, float]:
    if not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {e["iteration"]: e["lm_loss"] for e in entries if "lm_loss" in e}
