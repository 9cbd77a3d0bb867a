"""Fixtures that hand out groups of gloo processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: n processes, shared by the tests of a session."""
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        return groups.setdefault(size, Ranks(size))

    yield of_size
    for group in groups.values():
        group.kill()
