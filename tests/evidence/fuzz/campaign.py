"""Many random cases on one group of ranks, counted; the first that fails is made small."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.distributed.ranks import Ranks
from tests.evidence.fuzz.case import Case, options_in
from tests.evidence.fuzz.compare import complaints
from tests.evidence.fuzz.strategy import cases

__all__ = ["Compare", "Figures", "campaign", "failure_of"]

_CASE_SECONDS = 240.0
_SHRINKING_SECONDS = 60.0
"""A failure that hangs until a wait is over would else be made small for many minutes."""


_ROUND = 10
"""Cases that hypothesis draws in one go.  After ten it would draw five that differ little from each
new one: good for finding equal values by chance, bad for a wide choice."""


Compare = Callable[[int, Case], list[str]]
"""What a rank does with a case: ``(rank, case)``, to what is wrong with it."""


@dataclass
class Figures:
    """What a campaign did.

    Attributes:
        cases: how many were compared, all of them different; those of shrinking are not counted.
        smallest: the smallest case that fails, if one does.
        failure: what is wrong with it.
        tried: how often each thing was in a case, by (what, which).
    """

    cases: int = 0
    seconds: float = 0.0
    smallest: Case | None = None
    failure: str = ""
    tried: Counter[tuple[str, str]] = field(default_factory=Counter)


def failure_of(group: Ranks, case: Case, compare: Compare = complaints) -> str:
    """What is wrong with a case, and the Python that repeats it; empty if nothing is."""
    try:
        outcomes = group.outcomes(compare, case, timeout=_CASE_SECONDS)
    except pytest.fail.Exception as error:  # a rank died, or hangs
        found = [str(error)]
    else:
        found = [
            f"rank {rank}: {line}"
            for rank, outcome in enumerate(outcomes)
            for line in ([outcome.trace or str(outcome.error)] if outcome.error else outcome.value)
        ]
    if not found:
        return ""
    repeat = (
        "repeat it with python -m scripts.evidence fuzz --case, and --one-device if it was given, "
        "or in FOUND of test_found.py:"
    )
    return "\n".join([*found, repeat, f"    {case!r}"])


def campaign(group: Ranks, wanted: int, seed: int, compare: Compare = complaints) -> Figures:
    """Compare so many different cases; the same ones for a seed, a size and a hypothesis.

    It ends early with the first case that fails, when hypothesis has made it small.
    """
    figures = Figures()
    known: dict[Case, str] = {}
    shrink_until = math.inf

    def fused_is_plain(case: Case) -> None:
        nonlocal shrink_until
        enough = time.monotonic() > shrink_until if figures.failure else figures.cases == wanted
        if case not in known and not enough:
            known[case] = failure_of(group, case, compare)
            if not figures.failure:
                figures.cases += 1
                figures.tried.update((what, str(which)) for what, which in options_in(case))
        if known.get(case):
            if not figures.failure:
                shrink_until = time.monotonic() + _SHRINKING_SECONDS
            # The last one that is tried is the smallest.
            figures.smallest, figures.failure = case, known[case]
            raise AssertionError(figures.failure)

    settled = settings(
        max_examples=_ROUND,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    seeds = random.Random(seed)
    start = time.monotonic()
    while figures.cases < wanted and not figures.failure:
        search = settled(given(case=cases(group.size))(fused_is_plain))
        # It ends with the smallest case: its failure is among the figures.
        with contextlib.suppress(AssertionError):
            hypothesis.seed(seeds.getrandbits(64))(search)()
    figures.seconds = time.monotonic() - start
    return figures
