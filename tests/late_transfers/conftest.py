"""Overrides the ``ranks`` of gloo tests by processes with late transfers."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Gloo, Ranks


class _Late(Gloo):
    backward_apart = False  # also tests backwards in the caller's thread

    def join(self, size: int) -> None:
        from tests.late_transfers import late

        late.install()
        super().join(size)


class LateRanks(Ranks):
    """:class:`Ranks` with late transfers."""

    def backend_of(self, rank: int) -> Gloo:
        return _Late()


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[Ranks]:
    return LateRanks
