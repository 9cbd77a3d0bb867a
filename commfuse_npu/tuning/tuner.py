"""One question per shape, asked once per group, answered for all of its ranks alike."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tuning import cache
from commfuse_npu.tuning.candidates import candidates
from commfuse_npu.tuning.trials import fastest

__all__ = ["COLUMN", "ROW", "Layer", "Problem", "Tuning", "decisions", "tuned"]

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
        schedule: see :func:`~commfuse_npu.tuning.candidates.candidates`.
        run: does the work once, with a schedule or by torch's collectives (``None``), on numbers
            of its own.

    Raises:
        MismatchError, TransportError: see :meth:`Transport.begin`.
    """
    answers = decisions(transport)
    key = problem, schedule
    if key not in answers:
        answers[key] = _answer(transport, problem, schedule, tuning, run)
    return answers[key]


def decisions(transport: Transport) -> dict[tuple[Problem, Schedule], Schedule | None]:
    """What was decided for a group so far.  Emptied, alike on all ranks, it is decided again."""
    answers: dict[tuple[Problem, Schedule], Schedule | None]
    answers = transport.remembered.setdefault(__name__, {})
    return answers


def _answer(
    transport: Transport,
    problem: Problem,
    schedule: Schedule,
    tuning: Tuning,
    run: Callable[[Schedule | None], object],
) -> Schedule | None:
    name = f"tuning the {problem.half} of a {problem.layer} layer, {problem.block_rows} rows"
    transport.agree(name, path="tuning", problem=problem, schedule=schedule)
    folder = None if tuning.folder is None else Path(tuning.folder)
    question = _question(transport, problem, schedule)
    alternatives: list[Schedule | None] = [
        None,
        *candidates(schedule, transport.size, problem.block_rows),
    ]
    known = None
    if transport.rank == 0 and folder is not None:
        known = cache.read(folder, question, alternatives)
    known = transport.share(name, known)[0]
    if known is not None:
        return alternatives[known]

    def run_round(order: Sequence[int]) -> list[float]:
        mine = [_timed(transport, name, partial(run, alternatives[n])) for n in order]
        # A work is done when the last rank is done.
        return [max(times) for times in zip(*transport.share(name, mine), strict=True)]

    usual = alternatives.index(schedule) if schedule in alternatives else 1
    chosen, medians = fastest(len(alternatives), run_round, usual=usual)
    answer = alternatives[transport.share(name, chosen)[0]]
    seconds = {
        _name(alternatives[n]): median for n, median in enumerate(medians) if median is not None
    }
    if transport.rank == 0:
        listed = ", ".join(f"{what}: {1e3 * median:.2f} ms" for what, median in seconds.items())
        _logger.info("%s: %s (%s)", problem, _name(answer), listed)
        if folder is not None:
            cache.write(folder, question, answer, seconds)
    return answer


def _timed(transport: Transport, name: str, call: Callable[[], object]) -> float:
    transport.confirm(name)
    start = time.perf_counter()
    call()
    transport.synchronise()
    return time.perf_counter() - start


def _name(schedule: Schedule | None) -> str:
    return "plain" if schedule is None else str(schedule)


def _question(transport: Transport, problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Everything that the answer depends on, as JSON would give it back."""
    return {
        "machine": [platform.node(), platform.machine(), _processor(transport.device_type)],
        "versions": {name: _version(name) for name in ("commfuse-npu", "torch", "torch-npu")},
        "group": list(transport.ranks),
        "threads": torch.get_num_threads(),
        "problem": {**asdict(problem), "dtype": str(problem.dtype)},
        "schedule": asdict(schedule),
    }


def _processor(device_type: str) -> str:
    if device_type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device_type).get_device_name())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
