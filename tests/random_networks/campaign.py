"""Many random cases on one group of ranks; hypothesis shrinks the first failure and prints it."""

import random
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.distributed.ranks import Ranks
from tests.random_networks.case import Case
from tests.random_networks.strategy import cases

_CASE_SECONDS = 240.0

_ROUND = 10
"""Cases per hypothesis run.  After ten cases hypothesis draws five small variations of each new
one: good for finding equal values by chance, bad for a wide choice."""


def campaign(
    request: pytest.FixtureRequest,
    group: Ranks,
    wanted: int,
    compare: Callable[[int, Case], list[str]],
) -> None:
    """Assert that ``compare(rank, case)`` names no difference on any rank in ``wanted`` cases.

    The cases depend on test, group size and hypothesis version, and are the same in every run;
    ``--hypothesis-seed`` draws others, ``--random-cases`` more.
    """
    option = request.config.getoption
    wanted = option("--random-cases") or wanted

    @settings(
        max_examples=min(wanted, _ROUND), database=None, deadline=None, print_blob=False,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(case=cases(group.size))
    def nothing_differs(case: Case) -> None:
        differences = group.run(compare, case, timeout=_CASE_SECONDS)
        assert not any(differences), differences

    seeds = random.Random(f"{option('--hypothesis-seed')} {request.node.nodeid}")
    for _ in range(0, wanted, _ROUND):
        hypothesis.seed(seeds.getrandbits(64))(nothing_differs)()
