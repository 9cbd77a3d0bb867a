"""Random cases with late transfers, posted in batches, whatever the case says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.random_networks.case import Case
from tests.random_networks.compare import complaints


def in_batches(rank: int, case: Case) -> list[str]:
    return complaints(rank, replace(case, batched=True))


@pytest.mark.parametrize(("size", "cases"), [(2, 12), (3, 6)])
def test_fused_is_plain(random_cases, size: int, cases: int) -> None:
    random_cases(size, cases, seed=910, compare=in_batches)
