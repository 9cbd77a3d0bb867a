"""Finds the fastest schedule of a layer by trial at first use, and caches the answer on disk.

The best number of chunks depends on the shape, the group, the links and the speed of the GEMMs, and
so does whether fusing pays at all: if there is nothing to gain, smaller GEMMs and more messages
only cost.  So some schedules and torch's collectives (in Megatron's order, where it has one) run on
the real shape, interleaved, and the slower ones are eliminated (:func:`fastest`); rank 0 decides
for all ranks.  A trial is the whole forward of a layer, or its whole backward.

The answer holds for one machine and one set of versions (:func:`_question`).  It decides into
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
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from commfuse_npu import __version__
from commfuse_npu.plan import Schedule, default_shape
from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.runtime.transport import Transport

__all__ = ["Tuning", "decisions", "default_folder", "tuned"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuning:
    """Try schedules at first use.

    Args:
        folder: cache of answers between runs, ``None`` for none.  That of rank 0 is used.
    """

    # May differ between ranks: neither compared nor in the digest.
    folder: str | None = field(default=None, compare=False, repr=False)


def tuned(
    transport: Transport,
    problem: str,
    block_rows: int,
    schedule: Schedule,
    tuning: Tuning,
    run: Callable[[Schedule | None], object],
) -> Schedule | None:
    """The fastest schedule for ``problem``; ``None`` for torch's collectives.

    The first call for a problem is a collective over the group; later calls return its answer.

    Args:
        problem: the half of a layer that is tuned, its shape and its dtype.
        block_rows: rows of one rank's block.
        schedule: its lanes are the most that may be used.
        run: runs the problem once, with a schedule or with torch's collectives (``None``).

    Raises:
        MismatchError, TransportError: see :meth:`Transport.begin`.
    """
    schedule = transport.spec(schedule).schedule  # default lanes: at most those of the transport
    answers = decisions(transport)
    if (problem, schedule) in answers:
        return answers[problem, schedule]
    name = f"tuning {problem}"
    transport.agree(name, path="tuning", schedule=schedule)
    tried = [None, *candidates(schedule, transport.size, block_rows)]
    choices = {str(choice or "plain"): choice for choice in tried}
    question = _question(transport, problem, schedule)
    file = None
    if transport.rank == 0 and tuning.folder is not None:
        file = _file(Path(tuning.folder), question)
    answer = transport.share(name, file and remembered(file, question, choices))[0]
    if answer is None:

        def run_round(order: Sequence[str]) -> list[float]:
            measured = [_timed(transport, name, partial(run, choices[n])) for n in order]
            # The time of an alternative is that of the slowest rank.
            return [max(times) for times in zip(*transport.share(name, measured), strict=True)]

        usual = str(schedule if str(schedule) in choices else tried[1])
        chosen, medians = fastest(list(choices), run_round, usual)
        answer = transport.share(name, chosen)[0]
        if transport.rank == 0:
            listed = ", ".join(f"{choice}: {1e3 * t:.2f} ms" for choice, t in medians.items())
            _logger.info("%s: %s (%s)", problem, answer, listed)
        if file is not None:
            remember(file, {"question": question, "answer": answer, "seconds": medians})
    answers[problem, schedule] = choices[answer]
    return choices[answer]


def decisions(transport: Transport) -> dict[tuple[str, Schedule], Schedule | None]:
    """The answers for a transport so far.  Clear it on all ranks alike to tune again."""
    return _decisions.setdefault(transport, {})


_decisions: WeakKeyDictionary[Transport, dict[tuple[str, Schedule], Schedule | None]]
_decisions = WeakKeyDictionary()


def _timed(transport: Transport, name: str, call: Callable[[], object]) -> float:
    """Seconds of a call on this rank, after a barrier, until the device has finished."""
    transport.confirm(name)
    start = time.perf_counter()
    call()
    transport.synchronize()
    return time.perf_counter() - start


# -------------------------------------------------------------- what is tried

_LEAST_ROWS = 16
"""Per piece, because matrix units work on at least 16 rows."""

_CHUNKS = (1, 2, 3, 4, 6, 8)


def candidates(schedule: Schedule, size: int, block_rows: int) -> list[Schedule]:
    """Variations of ``schedule`` in lanes and chunks, the simplest first.

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
        for chunks in _CHUNKS:
            varied = replace(base, chunks=chunks)
            shortest = min(run.stop - run.start for run in varied.runs(block_rows))
            if chunks == 1 or shortest >= _LEAST_ROWS:
                schedules.append(varied)
    return schedules


# ----------------------------------------------------------- which is fastest

_ROUNDS = (1, 1, 4)
"""Rounds per stage; after each stage the slower half is eliminated."""

_FINALISTS = 3

_AS_FAST = 0.005
"""Relative difference up to which an alternative counts as equally fast."""


def fastest(
    alternatives: Sequence[str], run: Callable[[Sequence[str]], Sequence[float]], usual: str
) -> tuple[str, dict[str, float]]:
    """The fastest of the alternatives, of which the simplest is the first.

    Every round runs each remaining alternative once, in random order, so that changes in the speed
    of the machine affect all of them alike.

    Args:
        run: runs these alternatives in this order and returns their times in seconds; called on
            all ranks with the same argument, and returns the same on all ranks.
        usual: the choice without a trial.  Another one has to be faster by more than the spread
            (interquartile range) of both, because differences on a busy machine are noise.

    Returns:
        The first alternative within half a percent of the fastest; and the median of each that
        reached the last stage.
    """
    order = random.Random(0)
    remaining = list(alternatives)
    times: dict[str, list[float]] = {choice: [] for choice in alternatives}
    run(remaining)  # buffers are allocated, connections and caches warm
    for rounds in _ROUNDS:
        for _ in range(rounds):
            shuffled = order.sample(remaining, len(remaining))
            for choice, seconds in zip(shuffled, run(shuffled), strict=True):
                times[choice].append(seconds)
        medians = {choice: statistics.median(times[choice]) for choice in remaining}
        ranked = sorted(remaining, key=lambda choice: medians[choice])
        survivors = {*ranked[: max(_FINALISTS, len(ranked) // 2)], usual}
        remaining = [choice for choice in remaining if choice in survivors]
    limit = min(medians.values()) * (1 + _AS_FAST)
    chosen = next(choice for choice, seconds in medians.items() if seconds <= limit)
    quartiles = (
        statistics.quantiles(times[choice], n=4, method="inclusive") for choice in (chosen, usual)
    )
    if medians[usual] - medians[chosen] <= max(high - low for low, _, high in quartiles):
        chosen = usual
    return chosen, medians


# ------------------------------------------------------------- cached on disk


def default_folder() -> Path:
    """``commfuse_npu`` in the user's cache folder (``XDG_CACHE_HOME``, default ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "commfuse_npu"


def _question(transport: Transport, problem: str, schedule: Schedule) -> dict[str, Any]:
    """Everything that the answer depends on, as JSON has it."""
    device = transport.device_type
    processor = "cpu" if device == "cpu" else str(torch.get_device_module(device).get_device_name())
    torch_npu = getattr(sys.modules.get("torch_npu"), "__version__", None)
    return {
        "machine": [platform.node(), platform.machine(), processor],
        "versions": {"commfuse": __version__, "torch": str(torch.__version__), "npu": torch_npu},
        "group": list(transport.ranks),
        "threads": torch.get_num_threads(),
        "problem": problem,
        "schedule": str(schedule),
    }


def _file(folder: Path, question: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:24]
    return folder / f"schedule-{name}.json"


def remembered(file: Path, question: dict[str, Any], choices: Collection[str]) -> str | None:
    """The cached answer; ``None`` if there is none.

    A file that does not have this question, and one of the choices, is reported and ignored; the
    next answer overwrites it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["question"] == question and content["answer"] in choices:
            return str(content["answer"])
        why = f"its question or its answer, {content['answer']!r}, is another"
    except FileNotFoundError:
        return None
    # Broken UTF-8 or JSON are ValueErrors, the others come from JSON of another form.
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        why = repr(error)
    _logger.warning("%s is ignored: %s. It is tuned again", file, why)
    return None


def remember(file: Path, content: dict[str, Any]) -> None:
    """Cache an answer; if the folder cannot be written to, log a warning."""
    try:
        write_json(file, content, indent=1)
    except OSError as error:
        _logger.warning("the chosen schedule is not remembered in %s: %s", file, error)
