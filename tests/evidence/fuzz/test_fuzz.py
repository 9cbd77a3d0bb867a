"""Random cases, the same in every run; ``scripts.evidence fuzz`` runs more."""

from __future__ import annotations

import pytest

from tests.evidence.fuzz.campaign import campaign

SEED = 2604
MORE = ((1, 40), (2, 180), (3, 50), (4, 30))


@pytest.mark.parametrize(
    ("size", "cases"), [(2, 40), *(pytest.param(*of, marks=pytest.mark.long) for of in MORE)]
)
def test_fused_is_plain(ranks, size: int, cases: int) -> None:
    figures = campaign(ranks(size), cases, SEED)
    assert not figures.failure, figures.failure
    assert figures.cases == cases
