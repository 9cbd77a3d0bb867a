"""Overrides the ``ranks`` of gloo tests by processes with late transfers."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Gloo, Ranks


class _Late(Gloo):
    backward_apart = False  # also tests backwards in the caller's thread

    def join(self) -> None:
        from tests.late_transfers import late

        late.install()
        super().join()


class LateRanks(Ranks):
    """:class:`Ranks` with late transfers."""

    backend = _Late()


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[Ranks]:
    return LateRanks
