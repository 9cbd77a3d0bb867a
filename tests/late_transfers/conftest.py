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
