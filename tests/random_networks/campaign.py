"""Many random cases on one group of ranks; the first that fails is made small."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.distributed.ranks import Ranks
from tests.random_networks.case import Case
from tests.random_networks.compare import complaints
from tests.random_networks.strategy import cases

_CASE_SECONDS = 240.0
_SHRINKING_SECONDS = 60.0
"""To make a failure small that hangs until a wait is over."""

_ROUND = 10
"""Cases that hypothesis draws at once.  After ten it draws five that differ little from each new
case: good for finding equal values by chance, bad for a wide choice."""

Compare = Callable[[int, Case], list[str]]
"""What a rank does with a case: ``(rank, case)``, to what is wrong with it."""


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
    repeat = "to repeat it, add it to FOUND in tests/random_networks/test_random_networks.py:"
    return "\n".join([*found, repeat, f"    {case!r}"])


def campaign(
    group: Ranks, wanted: int, seed: int, compare: Compare = complaints
) -> tuple[int, str]:
    """Compare so many different cases: the same ones for a seed, a group size and a hypothesis.

    It ends with the first case that fails, when hypothesis has made it small.

    Returns:
        How many were compared, without those of shrinking, and what is wrong with the smallest
        case that fails, if one does.
    """
    failure, compared = "", 0
    known: dict[Case, str] = {}
    shrink_until = math.inf

    def fused_is_plain(case: Case) -> None:
        nonlocal failure, compared, shrink_until
        enough = time.monotonic() > shrink_until if failure else compared == wanted
        if case not in known and not enough:
            known[case] = failure_of(group, case, compare)
            compared += not failure
        if known.get(case):
            if not failure:
                shrink_until = time.monotonic() + _SHRINKING_SECONDS
            # The last one that is tried is the smallest.
            failure = known[case]
            raise AssertionError(failure)

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
    while compared < wanted and not failure:
        search = settled(given(case=cases(group.size))(fused_is_plain))
        with contextlib.suppress(AssertionError):
            hypothesis.seed(seeds.getrandbits(64))(search)()
    return compared, failure
