"""Finds the fastest schedule of a layer by trial at first use, and caches the answer on disk.

The best number of chunks depends on the shape, the group, the links and the speed of the GEMMs, and
so does whether fusing pays at all: if there is nothing to gain, smaller GEMMs and more messages
only cost.  So some schedules and torch's collectives (in Megatron's order, where it has one) run on
the real shape, interleaved, and the slower ones are eliminated (:func:`fastest`); rank 0 decides
for all ranks.  A trial is the whole forward of a layer, or its whole backward.

The answer holds for one machine and one set of versions (:func:`remembered`).  It decides into
which pieces GEMMs are cut, and some GEMM libraries round these differently.  If two runs have to
give the same bits, leave tuning off and set the schedule.
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

from commfuse_npu.plan import Schedule, default_shape
from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.runtime.transport import Transport

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
    """Try schedules at first use.

    Args:
        folder: cache of answers between runs, ``None`` for none.  That of rank 0 is used.
    """

    # May differ between ranks: neither compared nor in the digest.
    folder: str | None = field(default=None, compare=False, repr=False)


Layer = Literal["column", "row"]
COLUMN: Layer = "column"
ROW: Layer = "row"
"""Column-parallel: the input is gathered; row-parallel: the output is reduce-scattered."""


@dataclass(frozen=True)
class Problem:
    """What is tuned: the forward or the backward of a layer, with GEMMs, transfers and sums.

    Args:
        half: ``forward``, or ``backward`` with the gradients of input and weight.
        block_rows: rows of one rank's block.
        inputs, outputs: features of this rank's weight.
        dtype: of the GEMMs.
        wgrad: ``whole`` or ``blocks``, see :data:`~commfuse_npu.plan.rules.linear.Wgrad`.
    """

    layer: Layer
    half: str
    block_rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    wgrad: str


def tuned(
    transport: Transport,
    problem: Problem,
    schedule: Schedule,
    tuning: Tuning,
    run: Callable[[Schedule | None], object],
) -> Schedule | None:
    """The fastest schedule for ``problem``; ``None`` for torch's collectives.

    The first call for a problem is a collective over the group; later calls return its answer.

    Args:
        schedule: its lanes are the most that may be used.
        run: runs the problem once, with a schedule or with torch's collectives (``None``), on its
            own random inputs.

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
    answer = None
    if transport.rank == 0 and folder is not None:
        answer = remembered(folder, question, choices)
    answer = transport.share(name, answer)[0]
    if answer is None:

        def run_round(order: Sequence[int]) -> list[float]:
            measured = [_timed(transport, name, partial(run, choices[n])) for n in order]
            # The time of an alternative is that of the slowest rank.
            return [max(times) for times in zip(*transport.share(name, measured), strict=True)]

        usual = choices.index(schedule) if schedule in choices else 1
        chosen, medians = fastest(len(choices), run_round, usual=usual)
        answer = transport.share(name, chosen)[0]
        names = (str(choice or "plain") for choice in choices)
        seconds = {
            label: median
            for label, median in zip(names, medians, strict=True)
            if median is not None
        }
        if transport.rank == 0:
            listed = ", ".join(f"{name}: {1e3 * median:.2f} ms" for name, median in seconds.items())
            _logger.info("%s: %s (%s)", problem, choices[answer] or "plain", listed)
            if folder is not None:
                remember(folder, question, choices[answer], seconds)
    answers[problem, schedule] = choices[answer]
    return choices[answer]


def decisions(transport: Transport) -> dict[tuple[Problem, Schedule], Schedule | None]:
    """The answers for a transport so far.  Clear it on all ranks alike to tune again."""
    answers: dict[tuple[Problem, Schedule], Schedule | None]
    answers = transport.remembered.setdefault(__name__, {})
    return answers


def _timed(transport: Transport, name: str, call: Callable[[], object]) -> float:
    """Seconds of a call on this rank, after a barrier, until the device has finished."""
    transport.confirm(name)
    start = time.perf_counter()
    call()
    transport.synchronise()
    return time.perf_counter() - start


def _question(transport: Transport, problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Everything that the answer depends on, as JSON-compatible values."""
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
"""Per piece, because matrix units work on at least 16 rows."""

_EVEN = ((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (6, 1.0), (8, 1.0))
_TAPERED = ((2, 1.5), (4, 2.0), (6, 1.5))
"""For two ranks only.  With more, the long first pieces of all peers need memory of several blocks,
or delay each other; with four ranks on paced links none was ever fastest."""


def candidates(schedule: Schedule, size: int, block_rows: int) -> list[Schedule]:
    """Variations of ``schedule`` in lanes, chunks and taper, the simplest first.

    Args:
        schedule: its lanes are the most that may be used; ``node_size`` is kept.  For ``shifted``
            with three or more ranks, ``collective`` is tried, too.
        size: of the group.
        block_rows: rows of one rank's block.
    """
    most = min(schedule.lanes_for(size), max(1, size - 1))
    bases = [
        replace(schedule, lanes=lanes)
        for lanes in sorted({min(lanes, most) for lanes in (1, 2, most)}, reverse=True)
    ]
    shape = default_shape(size)
    if schedule.shape == "shifted" != shape:
        bases.append(Schedule(shape, lanes=1))
    schedules = []
    for base in bases:
        for chunks, taper in _EVEN + (_TAPERED if size == 2 else ()):
            varied = replace(base, chunks=chunks, taper=taper)
            shortest = min(run.stop - run.start for run in varied.runs(block_rows, "first"))
            if chunks == 1 or shortest >= _LEAST_ROWS:
                schedules.append(varied)
    return schedules


# ----------------------------------------------------------- which is fastest

_ROUNDS = (1, 1, 4)
"""Rounds per stage; after each stage but the last, the slower half is eliminated."""

_FINALISTS = 3

_AS_FAST = 0.005
"""Relative difference up to which an alternative counts as equally fast."""


def fastest(
    count: int,
    run: Callable[[Sequence[int]], Sequence[float]],
    *,
    usual: int = 0,
) -> tuple[int, list[float | None]]:
    """The fastest of the alternatives ``0 ... count - 1``.

    Every round runs each remaining alternative once, in random order, so that changes in the speed
    of the machine affect all of them alike.

    Args:
        run: runs these alternatives in this order and returns their times in seconds; called on
            all ranks with the same argument, and returns the same on all ranks.
        usual: the choice without a trial.  Another one has to be faster by more than the spread
            (interquartile range) of both, because differences on a busy machine are noise.

    Returns:
        The number of the first alternative within half a percent of the fastest; and the median of
        each that reached the last stage, ``None`` for the others.
    """
    remaining = list(range(count))
    order = random.Random(0)
    times: list[list[float]] = [[] for _ in remaining]
    run(remaining)  # buffers are allocated, connections and caches warm
    for number, rounds in enumerate(_ROUNDS):
        for _ in range(rounds):
            shuffled = order.sample(remaining, len(remaining))
            for alternative, seconds in zip(shuffled, run(shuffled), strict=True):
                times[alternative].append(seconds)
        if number < len(_ROUNDS) - 1:
            survivors = max(_FINALISTS, len(remaining) // 2)
            ranked = sorted(
                remaining, key=lambda option: (statistics.median(times[option]), option)
            )
            remaining = list(dict.fromkeys([*ranked[:survivors], usual]))
    medians = {option: statistics.median(times[option]) for option in remaining}
    limit = min(medians.values()) * (1 + _AS_FAST)
    chosen = min(option for option, seconds in medians.items() if seconds <= limit)
    quartiles = (
        statistics.quantiles(times[option], n=4, method="inclusive") for option in (chosen, usual)
    )
    if medians[usual] - medians[chosen] <= max(high - low for low, _, high in quartiles):
        chosen = usual
    return chosen, [medians.get(option) for option in range(count)]


# ------------------------------------------------------------- cached on disk

_FORMAT = 1


def default_folder() -> Path:
    """``commfuse_npu`` in the user's cache folder (``XDG_CACHE_HOME``, default ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "commfuse_npu"


def remembered(
    folder: Path, question: Mapping[str, Any], alternatives: Sequence[Schedule | None]
) -> int | None:
    """The index of the cached answer among ``alternatives``; ``None`` if there is none.

    A file is used only if it contains this question (machine and versions included), and an answer
    that is one of the alternatives.  Any other file is reported and ignored, and the next answer
    overwrites it.
    """
    path = _path(folder, question)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        if content.get("question") != _as_json(question):
            raise ValueError("it is about another machine, other versions or another shape")
        answers = [_as_json(choice and asdict(choice)) for choice in alternatives]
        if "answer" not in content or content["answer"] not in answers:
            raise ValueError(
                f"its answer {content.get('answer')} is none of the {len(answers)} choices"
            )
        return answers.index(content["answer"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # broken UTF-8 or JSON: ValueErrors
        _logger.warning("%s is ignored: %s. It is tuned again", path, error)
        return None


def remember(
    folder: Path, question: Mapping[str, Any], answer: Schedule | None, seconds: Mapping[str, float]
) -> None:
    """Cache an answer; if the folder cannot be written to, log a warning.

    Args:
        seconds: median times of the alternatives, for people who read the file.
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
    """A value after a round trip through JSON."""
    return json.loads(json.dumps(value))
