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
    "test_attention__without_gradients",
    "test_attention__parts_of_one_tensor",
    "test_buckets__sums_of_whole_numbers",
    "test_buckets__ranks_may_wait_in_different_orders[2-batched-100]",
    "test_buckets__users_of_one_transport_share_an_order[batched]",
    "test_buckets__rows_behind_a_sum",
    "test_linear__all_reduce_takes_any_number_of_rows[3]",
    "test_linear__all_reduce_adds_in_the_order_of_a_reduce_scatter[4]",
    "test_linear__training_after_inference",
    "test_linear__buffers_are_used_again",
    "test_programs__equals_the_collective[3-swap-batched]",
    "test_sharded_linear__without_gradients_and_under_autocast",
    "test_ulysses__small",
}
"""The tests of other folders that are in the short tier here; without brackets: all their cases."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests written for gloo a few are in the short tier."""
    for item in items:
        if item.path.name == "test_operators.py" and not (
            {item.name, item.name.split("[")[0]} & REPRESENTATIVE
        ):
            item.add_marker(pytest.mark.long)
