"""Fixtures that hand out processes on an emulated HCCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.emulator import batches_only
from tests.emulator.emulated_ranks import EmulatedRanks
from tests.emulator.settings import Settings


@pytest.fixture(scope="package")
def emulated() -> Iterator[Callable[..., EmulatedRanks]]:
    """``emulated(n, settings)``: n processes, shared by all tests of the folder."""
    groups: dict[int, EmulatedRanks] = {}

    def of_size(size: int, settings: Settings | None = None) -> EmulatedRanks:
        group = groups.setdefault(size, EmulatedRanks(size, batches_only.install))
        group.settings = settings or Settings()
        return group

    yield of_size
    for group in groups.values():
        group.kill()


@pytest.fixture
def ranks(emulated: Callable[..., EmulatedRanks]) -> Callable[[int], EmulatedRanks]:
    """In place of the gloo processes of this name: what was written for them runs on these."""
    streams = int(os.environ.get("EMULATE_STREAMS", "0")) or None
    return lambda size: emulated(size, Settings(max_delay=0.0003, seed=size, streams=streams))


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
