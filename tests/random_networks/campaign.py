"""Many random cases on one group of ranks; the first failure is shrunk."""

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
"""Time limit for shrinking a failure, each case of which may hang until a timeout."""

_ROUND = 10
"""Cases per hypothesis run.  After ten cases hypothesis draws five small variations of each new
one: good for finding equal values by chance, bad for a wide choice."""

Compare = Callable[[int, Case], list[str]]
"""``compare(rank, case)`` runs a case on a rank and returns its differences."""


def failure_of(group: Ranks, case: Case, compare: Compare = complaints) -> str:
    """The differences of a case and the Python that repeats it; empty if there are none."""
    try:
        outcomes = group.outcomes(compare, case, timeout=_CASE_SECONDS)
    except pytest.fail.Exception as error:  # a rank died, or hangs
        messages = [str(error)]
    else:
        messages = [
            f"rank {rank}: {line}"
            for rank, outcome in enumerate(outcomes)
            for line in ([outcome.trace or str(outcome.error)] if outcome.error else outcome.value)
        ]
    if not messages:
        return ""
    repeat = "to repeat it, add it to FOUND in tests/random_networks/test_random_networks.py:"
    return "\n".join([*messages, repeat, f"    {case!r}"])


def campaign(
    group: Ranks, wanted: int, seed: int, compare: Compare = complaints
) -> tuple[int, str]:
    """Compare ``wanted`` different cases, which depend on seed, group size and hypothesis version.

    The campaign ends with the first case that fails, after hypothesis has shrunk it.

    Returns:
        The number of compared cases, without those of shrinking, and the failure of the smallest
        failing case, or "".
    """
    failure, compared = "", 0
    failures: dict[Case, str] = {}
    shrink_until = math.inf

    def fused_is_plain(case: Case) -> None:
        nonlocal failure, compared, shrink_until
        enough = time.monotonic() > shrink_until if failure else compared == wanted
        if case not in failures and not enough:
            failures[case] = failure_of(group, case, compare)
            compared += not failure
        if failures.get(case):
            if not failure:
                shrink_until = time.monotonic() + _SHRINKING_SECONDS
            # The last failing case is the smallest.
            failure = failures[case]
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
