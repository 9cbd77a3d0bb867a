"""Times the forms of a workload on links with a rate, in shuffled rounds."""

import os
import random
from collections.abc import Callable, Collection, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from commfuse_npu.tools.measure.measuring_steps import Scale, Times
from commfuse_npu.tools.ranks import RanksError
from commfuse_npu.tools.terminal import tell
from scripts.evidence.measured.works import COMPUTE, NAMES, REFERENCE, WORKS

_CALIBRATION_ROUNDS = 5
_GFLOPS = 15.0
"""Modeled GFLOPS of a rank with sleeping GEMMs, a quarter of a core: the ranks share the cores,
and at a higher rate their Python code and copies would be most of the time."""

Ask = Callable[..., list[Any]]
"""Calls a method of :class:`.forms_worker.FormsWorker`; returns results by rank."""


class Sample(NamedTuple):
    """Seconds of one run: wall time, and host time spent waiting for transfers."""

    total: float
    blocked: float


def time_forms(
    ask: Ask, scale: Scale, work: str, ratio: float, names: Collection[str], rounds: int
) -> Times:
    """Set the links, check each form, then time all of them in every round.

    With more ranks than cores GEMMs sleep (:mod:`.sleeping`).

    Args:
        ratio: time of the transfers on the links / time of the computation alone, for which the
            links get a rate; 0 for none.
        names: of forms, besides the reference.

    Returns:
        A row per form, and one of ``compute``, the workload without any communication: of each
        round the ``seconds`` of the slowest rank and those that ranks were ``blocked`` in waits for
        transfers, on average; the largest ``difference`` of outputs and gradients from the
        reference's; and the share of the links' rate that a message ``reached`` alone.

    Raises:
        RanksError: the links cannot be given a rate.
    """
    kind = WORKS[work]
    label = f"{work}, ratio {ratio:g}"
    forms = [form for form in NAMES if form in (REFERENCE, *names)]
    sleeps = scale.ranks > (os.cpu_count() or 1)
    ask("set_up", work, scale, _GFLOPS if sleeps else None)
    reached = None
    if ratio:
        # Only to set the links, not as a result: the rounds measure it again.
        calibration = _round(ask, [COMPUTE] * (_CALIBRATION_ROUNDS + 1))[1:]
        compute = median(sample.total for sample in calibration)
        reached = _paced(ask, kind.bytes_per_pair(scale) / (ratio * compute))
    differences = {}
    for form in forms:
        tell(f"{label}: checking {form}")
        differences[form] = max(ask("check", form))
    order = [COMPUTE, *forms]
    shuffle = random.Random(label)
    measured: dict[str, list[Sample]] = {form: [] for form in order}
    for number in range(rounds):
        tell(f"{label}: round {number + 1} of {rounds}")
        # Interleaving spreads drift (clock rates, other load) evenly over all forms;
        # shuffling avoids that one always follows the same neighbor.
        shuffle.shuffle(order)
        for form, sample in zip(order, _round(ask, order), strict=True):
            measured[form].append(sample)
    if ratio:
        ask("pace", None)
    return [
        {
            "work": work,
            "ratio": ratio,
            "form": name,
            "reached": reached,
            "difference": differences.get(name, 0.0),
            "seconds": [sample.total for sample in samples],
            "blocked": [sample.blocked for sample in samples],
        }
        for name, samples in measured.items()
    ]


def _paced(ask: Ask, rate: float) -> float:
    """Limit the rate of the links; returns the share of it that a message to each peer reaches."""
    if problems := set(ask("pace", rate)) - {""}:
        raise RanksError(
            f"links cannot be given a rate: {'; '.join(sorted(problems))}; run on Linux 4.20 or "
            "newer, outside of sandboxes that replace the kernel's sockets, or give --ratios 0"
        )
    size = min(int(rate / 20), 1 << 24)
    slowest = max(max(times) for times in ask("messages", size, 1))
    return size / slowest / rate


def _round(ask: Ask, order: Sequence[str]) -> list[Sample]:
    by_form = zip(*ask("round", list(order)), strict=True)
    return [
        Sample(max(sample.total for sample in ranks), mean(sample.blocked for sample in ranks))
        for ranks in by_form
    ]
