"""Compare one case on one rank: with the plain form bit for bit, and with fp64."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import transport
from tests.random_networks.bucket_run import run_buckets
from tests.random_networks.case import ATTENTION, BucketRun, Case, Form, Network
from tests.random_networks.network_run import run_network
from tests.random_networks.values import Found, round_once


def run_case(case: Case, form: Form, link: Transport | None = None) -> Found:
    """The results of this rank; ``link`` defaults to the transport of the case."""
    if isinstance(case, BucketRun):
        return run_buckets(case, form, link)
    return run_network(case, form, link)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings: cases have empty or gradient-free inputs on purpose."""
    logger = logging.getLogger("commfuse_npu")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logger.setLevel(level)


def at_rest(link: Transport) -> None:
    """Raise if a transfer is pending: these processes cannot be used any more.

    Raises:
        RuntimeError: also for a broken transport, or scratch that was not returned.
    """
    if link.in_flight or link.broken or link.scratch.lent:
        raise RuntimeError(
            f"{link.in_flight} under way, {link.scratch.lent} arenas of scratch not given back, "
            f"broken: {link.broken and link.error()}"
        )


def differences(ours: Found, plain: Found) -> list[str]:
    """The first result that is missing, unexpected or different from the plain form in a bit."""
    try:
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    except AssertionError as error:
        return [str(error)]
    return []


def complaints(rank: int, case: Case, link: Transport | None = None) -> list[str]:
    """Differences of a case between fused and plain form on this rank; a collective call.

    The distance of one layer on rounded values from fp64 is checked, too.

    Raises:
        RuntimeError: a transfer is still pending, so these processes cannot be used any more.
    """
    with quiet(), round_once():
        ours = run_case(case, "fused", link)
        at_rest(link or transport(case.lanes))
        messages = differences(ours, run_case(case, "plain", link))
        if isinstance(case, Network) and case.rounded and len(case.layers) == 1:
            messages += distances(case, ours, run_case(case, "exact", link))
    return messages


def distances(case: Network, ours: Found, exact: Found) -> list[str]:
    """Results that are too far from fp64, relative to the largest value: 1e-4, or 8 epsilon.

    Attention rounds probabilities and their gradients, too: 16 epsilon.
    """
    epsilons = 16 if case.layers[0].op in ATTENTION else 8
    messages = []
    for name, value in exact.items():
        if value is None or not value.numel() or not value.is_floating_point():
            continue
        result = ours[name]
        assert result is not None
        coarsest = max(torch.finfo(dtype).eps for dtype in (case.dtype, result.dtype))
        limit = max(1e-4, epsilons * coarsest)
        most = float(value.abs().max()) or 1.0
        away = float((result.double() - value).abs().max()) / most
        if not away <= limit:
            messages.append(f"{name} is off by {away:.2e}, not {limit:.2e} at most")
    return messages
