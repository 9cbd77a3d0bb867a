"""The transports of a rank: made once, and used by all cases."""

from __future__ import annotations

from functools import lru_cache

from commfuse_npu.runtime.agreement import Check
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT
from tests.random_networks.case import LANES, Case


@lru_cache
def _all_lanes() -> Transport:
    return Transport.create(lanes=LANES, timeout=PATIENT)


@lru_cache
def _transport(lanes: int, batched: bool, check: Check) -> Transport:
    # On the same lanes, one after the other: each process group has threads that poll.
    made = _all_lanes()
    return Transport(
        made.group,
        made.lane_groups[:lanes],
        made._control,
        timeout=PATIENT,
        batched=batched,
        check=check,
    )


def transport_of(case: Case) -> Transport:
    """As the case wants it.  Every rank asks for it together."""
    return _transport(case.lanes, case.batched, case.check)


def at_rest(link: Transport) -> list[str]:
    """What is still under way although nothing should be."""
    found = [f"{exchange.name} is still under way" for exchange in link._in_flight]
    if link._broken is not None:
        found.append(f"the transport is broken: {link._broken}")
    if link.scratch.lent:
        found.append(f"{link.scratch.lent} arenas of scratch were not given back")
    return found
