"""Which schedule is fastest here: tried out at first use, remembered on disk.

How many chunks pay depends on the shape, the group, the links and the speed of the GEMMs together,
and whether fusing pays at all does too: without anything to gain, smaller GEMMs and more messages
only cost.  So a few schedules and torch's collectives (in Megatron's order, where it has one) run
on the real shape, interleaved, until the slower ones are out (:func:`fastest`); rank 0 decides for
all.  What is tried is what runs: the whole forward of a layer, or its whole backward.

The answer is a matter of this machine and these versions (:func:`remembered`), and it decides in
which pieces GEMMs run, which some GEMM libraries round differently.  Where two runs have to give
the same bits, leave it off and fix the schedule.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from commfuse_npu.plan import Schedule, usual_shape
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.runtime.whole_file import write_json

__all__ = [
    "COLUMN",
    "ROW",
    "Layer",
    "Problem",
    "Tuning",
    "decisions",
    "default_folder",
    "tuned",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuning:
    """Try schedules out at first use.

    Args:
        folder: where answers are kept between runs, ``None`` for nowhere.  Rank 0's counts.
    """

    # No part of what the ranks agree on: neither compared nor in the digest.
    folder: str | None = field(default=None, compare=False, repr=False)


Layer = Literal["column", "row"]
COLUMN: Layer = "column"
ROW: Layer = "row"
"""Parallel by columns: the input is gathered; by rows: the output is reduce-scattered."""


@dataclass(frozen=True)
class Problem:
    """Half of a layer, with everything that runs in it: GEMMs, transfers, sums.

    Args:
        half: ``forward``, or ``backward`` with the gradients of input and weight.
        block_rows: rows of one rank's block.
        inputs, outputs: features of this rank's weight.
        dtype: of the GEMMs, ``torch.float32`` and so on.
        wgrad: how the weight gradient is made.
        kept: whether the gathered input is kept for the backward.
    """

    layer: Layer
    half: str
    block_rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    wgrad: str
    kept: bool


def tuned(
    transport: Transport,
    problem: Problem,
    schedule: Schedule,
    tuning: Tuning,
    run: Callable[[Schedule | None], object],
) -> Schedule | None:
    """The fastest way to do ``problem``: a schedule, or ``None`` for torch's collectives.

    A collective over the group at the first call for a problem; later ones look it up.

    Args:
        schedule: its lanes are the most that may be used.
        run: does the work once, with a schedule or by torch's collectives (``None``), on numbers
            of its own.

    Raises:
        MismatchError, TransportError: see :meth:`Transport.begin`.
    """
    answers = decisions(transport)
    if (problem, schedule) in answers:
        return answers[problem, schedule]
    name = f"tuning the {problem.half} of a {problem.layer} layer, {problem.block_rows} rows"
    transport.agree(name, path="tuning", problem=problem, schedule=schedule)
    folder = None if tuning.folder is None else Path(tuning.folder)
    question = _question(transport, problem, schedule)
    choices: list[Schedule | None] = [
        None,
        *candidates(schedule, transport.size, problem.block_rows),
    ]
    known = None
    if transport.rank == 0 and folder is not None:
        known = remembered(folder, question, choices)
    known = transport.share(name, known)[0]
    if known is None:

        def run_round(order: Sequence[int]) -> list[float]:
            mine = [_timed(transport, name, partial(run, choices[n])) for n in order]
            # A work is done when the last rank is done.
            return [max(times) for times in zip(*transport.share(name, mine), strict=True)]

        usual = choices.index(schedule) if schedule in choices else 1
        chosen, medians = fastest(len(choices), run_round, usual=usual)
        known = transport.share(name, chosen)[0]
        names = (str(choice or "plain") for choice in choices)
        seconds = {of: one for of, one in zip(names, medians, strict=True) if one is not None}
        if transport.rank == 0:
            listed = ", ".join(f"{what}: {1e3 * median:.2f} ms" for what, median in seconds.items())
            _logger.info("%s: %s (%s)", problem, choices[known] or "plain", listed)
            if folder is not None:
                remember(folder, question, choices[known], seconds)
    answers[problem, schedule] = choices[known]
    return choices[known]


def decisions(transport: Transport) -> dict[tuple[Problem, Schedule], Schedule | None]:
    """What was decided for a group so far.  Emptied, alike on all ranks, it is decided again."""
    answers: dict[tuple[Problem, Schedule], Schedule | None]
    answers = transport.remembered.setdefault(__name__, {})
    return answers


def _timed(transport: Transport, name: str, call: Callable[[], object]) -> float:
    transport.confirm(name)
    start = time.perf_counter()
    call()
    transport.synchronise()
    return time.perf_counter() - start


def _question(transport: Transport, problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Everything that the answer depends on, as JSON would give it back."""
    device = transport.device_type
    processor = "cpu" if device == "cpu" else str(torch.get_device_module(device).get_device_name())
    return {
        "machine": [platform.node(), platform.machine(), processor],
        "versions": {name: _version(name) for name in ("commfuse-npu", "torch", "torch-npu")},
        "group": list(transport.ranks),
        "threads": torch.get_num_threads(),
        "problem": {**asdict(problem), "dtype": str(problem.dtype)},
        "schedule": asdict(schedule),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -------------------------------------------------------------- what is tried

_LEAST_ROWS = 16
"""Of a piece: matrix units work on 16 rows at least."""

_EVEN = ((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (6, 1.0), (8, 1.0))
_TAPERED = ((2, 1.5), (4, 2.0), (6, 1.5))
"""For two ranks.  With more, long first pieces of all peers need the memory of several blocks at
once, or hold each other up; none was ever fastest on paced links with four."""


def candidates(schedule: Schedule, size: int, block_rows: int) -> list[Schedule]:
    """Variations of ``schedule`` in lanes, chunks and taper, the simplest first.

    Args:
        schedule: its lanes are the most that may be used; nodes stay.  What is ``shifted`` among
            three ranks or more is tried as collectives, too.
        size: of the group.
        block_rows: rows of one rank's block.
    """
    most = min(schedule.lanes_for(size), max(1, size - 1))
    bases = [
        replace(schedule, lanes=lanes)
        for lanes in sorted({min(lanes, most) for lanes in (1, 2, most)}, reverse=True)
    ]
    shape = usual_shape(size)
    if schedule.shape == "shifted" and schedule.costs is None and shape != schedule.shape:
        bases.append(Schedule(shape, lanes=1))
    found = []
    for base in bases:
        for chunks, taper in _EVEN + (_TAPERED if size == 2 else ()):
            varied = replace(base, chunks=chunks, taper=taper)
            shortest = min(run.stop - run.start for run in varied.runs(block_rows, "first"))
            if chunks == 1 or shortest >= _LEAST_ROWS:
                found.append(varied)
    return found


# ----------------------------------------------------------- which is fastest

_ROUNDS = (1, 1, 4)
"""Rounds before the slower half goes; the last ones are between what is left."""

_FINALISTS = 3

_AS_FAST = 0.005
"""A share by which an alternative may be slower."""


def fastest(
    count: int,
    run: Callable[[Sequence[int]], Sequence[float]],
    *,
    usual: int = 0,
) -> tuple[int, list[float | None]]:
    """The fastest of the alternatives ``0 ... count - 1``.

    Every round runs what is left once, in an order of its own, so that a machine that becomes
    slower or faster meanwhile treats them alike.

    Args:
        run: runs these alternatives in this order and gives their times in seconds; called alike
            on all ranks, with the same result on all ranks.
        usual: what is taken without a trial.  Another one has to be faster by more than the spread
            of both: on a busy machine differences are noise.

    Returns:
        its number, or that of the first that is slower by no more than half a percent, and the
        median of each that reached the last round, ``None`` for the others.
    """
    left = list(range(count))
    order = random.Random(0)
    times: list[list[float]] = [[] for _ in left]
    run(left)  # buffers are allocated, connections and caches warm
    for number, rounds in enumerate(_ROUNDS):
        for _ in range(rounds):
            shuffled = order.sample(left, len(left))
            for alternative, seconds in zip(shuffled, run(shuffled), strict=True):
                times[alternative].append(seconds)
        if number < len(_ROUNDS) - 1:
            kept = max(_FINALISTS, len(left) // 2)
            ranked = sorted(left, key=lambda one: (statistics.median(times[one]), one))
            left = list(dict.fromkeys([*ranked[:kept], usual]))
    medians = {one: statistics.median(times[one]) for one in left}
    limit = min(medians.values()) * (1 + _AS_FAST)
    chosen = min(one for one, seconds in medians.items() if seconds <= limit)
    quartiles = (
        statistics.quantiles(times[one], n=4, method="inclusive") for one in (chosen, usual)
    )
    if medians[usual] - medians[chosen] <= max(high - low for low, _, high in quartiles):
        chosen = usual
    return chosen, [medians.get(one) for one in range(count)]


# --------------------------------------------------------- remembered on disk

_FORMAT = 1


def default_folder() -> Path:
    """``commfuse_npu`` in the user's cache folder (``XDG_CACHE_HOME``, by default ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "commfuse_npu"


def remembered(
    folder: Path, question: Mapping[str, Any], alternatives: Sequence[Schedule | None]
) -> int | None:
    """Which of the alternatives is remembered as the answer; ``None`` if none is.

    A file is used only if it says of itself that it answers this question - on this machine, with
    these versions - with one of the alternatives that there are.  Anything else is reported once
    and passed over, and the next answer is written over it.
    """
    path = _path(folder, question)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        if found.get("question") != _as_json(question):
            raise ValueError("it is about another machine, other versions or another shape")
        known = [_as_json(choice and asdict(choice)) for choice in alternatives]
        if "answer" not in found or found["answer"] not in known:
            raise ValueError(
                f"its answer {found.get('answer')} is none of the {len(known)} choices"
            )
        return known.index(found["answer"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # broken UTF-8 or JSON: ValueErrors
        _logger.warning("%s is passed over: %s. It is measured again", path, error)
        return None


def remember(
    folder: Path, question: Mapping[str, Any], answer: Schedule | None, seconds: Mapping[str, float]
) -> None:
    """Remember an answer; a folder that cannot be written to is reported, not an error.

    Args:
        seconds: median times of what was compared, for people who look.
    """
    path = _path(folder, question)
    content = {
        "format": _FORMAT,
        "question": dict(question),
        "answer": answer and asdict(answer),
        "seconds": dict(seconds),
    }
    try:
        write_json(path, content, indent=1)
    except OSError as error:
        _logger.warning("the chosen schedule is not remembered in %s: %s", path, error)


def _path(folder: Path, question: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:24]
    return folder / f"schedule-{name}.json"


def _as_json(value: Any) -> Any:
    """What a value is after writing and reading it."""
    return json.loads(json.dumps(value))
