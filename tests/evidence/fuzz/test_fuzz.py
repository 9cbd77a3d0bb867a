"""A few hundred random cases, the same in every run; ``scripts.evidence fuzz`` runs more."""

from __future__ import annotations

import pytest

from tests.evidence.fuzz.campaign import campaign

SEED = 2604


@pytest.mark.parametrize(("size", "cases"), [(1, 40), (2, 180), (3, 50), (4, 30)])
def test_fused_is_plain(ranks, size: int, cases: int) -> None:
    figures = campaign(ranks(size), cases, SEED)
    assert not figures.failure, figures.failure
    assert figures.cases == cases
