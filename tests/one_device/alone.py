"""One case on each rank alone, on streams that are late: the bits of the plain form."""

from __future__ import annotations

from tests.one_device.backend import register
from tests.one_device.recording import ReplayError
from tests.random_networks.case import BucketRun, Case
from tests.random_networks.compare import at_rest_or_raise, differences, quiet, run_case
from tests.random_networks.transports import transport_of

__all__ = ["complaints_alone"]


def complaints_alone(rank: int, case: Case) -> list[str]:
    """What is wrong with a case when this rank runs it alone, after all ranks ran it together.

    Raises:
        RuntimeError: a transfer is still under way, so that these processes are of no more use.
    """
    device = register()
    transport_of(case)  # its lanes are warmed up by all ranks
    with quiet():
        if isinstance(case, BucketRun):
            # What is new to the ranks is compared with nothing under way: an order of its own.
            run_case(case, "fused")
        with device.recording() as recording:
            together = run_case(case, "fused")
        at_rest_or_raise(case)
        found, alone = [], None
        try:
            with device.replaying(recording):
                alone = run_case(case, "fused")
        except ReplayError as error:
            found.append(str(error))
        at_rest_or_raise(case)
        plain = run_case(case, "plain")
    found += [f"together, {line}" for line in differences(together, plain)]
    if alone is not None:
        found += [f"alone, {line}" for line in differences(alone, plain)]
    return found
