"""Compare one case on one rank: with the plain form bit for bit, and with fp64."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from commfuse_npu.runtime.transport import Transport
from tests.random_networks.bucket_run import run_buckets
from tests.random_networks.case import BucketRun, Case, Form, Network
from tests.random_networks.network_run import run_network
from tests.random_networks.transports import at_rest, transport_of
from tests.random_networks.values import Found


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


def differences(ours: Found, plain: Found) -> list[str]:
    """The first result that is missing, unexpected or different from the plain form in a bit."""
    try:
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    except AssertionError as error:
        return [str(error)]
    return []


def complaints(rank: int, case: Case, link: Transport | None = None) -> list[str]:
    """Differences of a case between fused and plain form on this rank; a collective call.

    Raises:
        RuntimeError: a transfer is still pending, so these processes cannot be used any more.
    """
    with quiet():
        ours = run_case(case, "fused", link)
        at_rest(link or transport_of(case))
        plain = run_case(case, "plain", link)
    return differences(ours, plain)


def distances(rank: int, case: Network) -> list[str]:
    """Results of a rounded network whose distance from fp64 exceeds the limit.

    The limit, relative to the largest value, is 1.25 times the distance of the unsplit form.
    fp32: from 1e-5 to 1e-4, times ten for each further layer.  Lower precision: plus a quarter
    of epsilon.
    """
    with quiet():
        ours, unsplit, exact = (run_case(case, form) for form in ("fused", "unsplit", "exact"))
    messages = []
    for name, value in exact.items():
        if value is None or not value.numel():
            continue
        limit = 1.25 * _distance(unsplit[name], value)
        if case.dtype == torch.float32:
            least = 1e-6 * 10 ** len(case.layers)
            limit = min(max(limit, least), 10 * least)
        else:
            limit += torch.finfo(case.dtype).eps / 4
        if not (away := _distance(ours[name], value)) <= limit:
            messages.append(f"{name} is off by {away:.2e}, not {limit:.2e} at most")
    return messages


def _distance(ours: torch.Tensor | None, exact: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert ours is not None
    most = float(exact.abs().max()) or 1.0
    return float((ours.double() - exact).abs().max()) / most


def in_full(rank: int, cases: Sequence[Network]) -> list[str]:
    """Complaints about rounded networks: differences of bits, and distances from fp64."""
    return [
        f"{case}: {line}"
        for case in cases
        for line in (*complaints(rank, case), *distances(rank, case))
    ]
