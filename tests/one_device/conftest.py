"""Groups of processes on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.ranks import Ranks
from tests.one_device.ranks import RanksOfOneDevice


@pytest.fixture(scope="package")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: n processes, shared by all tests of the folder."""
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        return groups.setdefault(size, RanksOfOneDevice(size))

    yield of_size
    for group in groups.values():
        group.kill()
