"""Ranks whose transfers are late, under the name that tests written for gloo ask for."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Gloo, Ranks


class _Late(Gloo):
    backward_apart = False  # so that the caller's thread is tested, too

    def join(self, size: int) -> None:
        from tests.late_transfers import late

        late.install()
        super().join(size)


class LateRanks(Ranks):
    """As :class:`Ranks`, with late transfers."""

    def backend_of(self, rank: int) -> Gloo:
        return _Late()


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[Ranks]:
    return LateRanks


REPRESENTATIVE = {
    "test_bucket_order__rows_wait_for_what_is_in_front",
    "test_linear__training_after_inference",
    "test_linear__buffers_are_used_again",
    "test_weight_prefetch__orders_that_differ",
    "test_accuracy__heads_without_gradients",
}
"""The tests of other folders that are in the short tier here, but for cases that are long there."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests written for gloo a few are in the short tier."""
    for item in items:
        if item.path.name == "test_operators.py" and item.originalname not in REPRESENTATIVE:
            item.add_marker(pytest.mark.long)
