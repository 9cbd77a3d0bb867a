"""Fixtures that hand out groups of gloo processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: n processes, shared by the tests of a module.

    They end with it: each process group that is left has a thread that gloo wakes a hundred times a
    second, and those of a few modules take a core of their own.
    """
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        return groups.setdefault(size, Ranks(size))

    yield of_size
    for group in groups.values():
        group.kill()
