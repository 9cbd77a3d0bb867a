"""The transports of a rank: created once and used by all cases."""

from __future__ import annotations

from functools import lru_cache

from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT
from tests.random_networks.case import LANES, Case


@lru_cache
def _all_lanes() -> Transport:
    return Transport.create(lanes=LANES, timeout=PATIENT)


@lru_cache
def _transport(lanes: int, batched: bool) -> Transport:
    # All transports share the lanes, because each process group has threads that poll.
    shared = _all_lanes()
    return Transport(
        shared.group,
        shared.lane_groups[:lanes],
        shared._control,
        timeout=PATIENT,
        batched=batched,
    )


def transport_of(case: Case) -> Transport:
    """The transport for a case; a collective call."""
    return _transport(case.lanes, case.batched)


def at_rest(link: Transport) -> None:
    """Raise if a transfer is pending: these processes cannot be used any more.

    Raises:
        RuntimeError: also for a broken transport, or scratch that was not returned.
    """
    pending = [f"{exchange.name} is still under way" for exchange in link._in_flight]
    if pending or link._broken is not None or link.scratch.lent:
        raise RuntimeError(
            f"{pending}, {link.scratch.lent} arenas of scratch not given back, {link._broken}"
        )
