"""Processes whose ranks run together first, and then each of them alone."""

from __future__ import annotations

from tests.distributed.ranks import Gloo, Ranks
from tests.limits import PATIENT


class OneDevice(Gloo):
    """The backend of one device in the place of gloo."""

    def join(self, size: int) -> None:
        import torch.distributed as dist

        from tests.one_device.backend import BACKEND, register

        register()
        dist.init_process_group(BACKEND, timeout=PATIENT)


class RanksOfOneDevice(Ranks):
    """As :class:`Ranks`, over the backend of one device."""

    def backend_of(self, rank: int) -> OneDevice:
        return OneDevice()
