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


def _difference(ours: torch.Tensor | None, plain: torch.Tensor | None) -> str | None:
    if ours is None or plain is None:
        return None if ours is plain else f"{_of(ours)} instead of {_of(plain)}"
    if (ours.dtype, ours.shape) != (plain.dtype, plain.shape):
        return f"{_of(ours)} instead of {_of(plain)}"
    if torch.equal(ours, plain):
        return None
    wrong = (ours != plain).nonzero()
    where = tuple(wrong[0].tolist())
    return (
        f"{len(wrong)} of {ours.numel()} numbers differ; at {where} "
        f"{ours[where].item()} instead of {plain[where].item()}"
    )


def _of(x: torch.Tensor | None) -> str:
    return "nothing" if x is None else f"{x.dtype} {tuple(x.shape)}"


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


def at_rest_or_raise(case: Case, link: Transport | None = None) -> None:
    """Raise if a transfer is still pending: these processes cannot be used any more."""
    pending = at_rest(link or transport_of(case))
    if pending:
        raise RuntimeError("; ".join(pending))


def differences(ours: Found, plain: Found) -> list[str]:
    """Messages about results that are missing, unexpected or different from the plain form."""
    messages = [f"{name} is missing" for name in plain.keys() - ours.keys()]
    messages += [f"{name} is not in the plain form" for name in ours.keys() - plain.keys()]
    for name in plain:
        if name in ours:
            difference = _difference(ours[name], plain[name])
            if difference is not None:
                messages.append(f"{name}: {difference}")
    return messages


def complaints(rank: int, case: Case, link: Transport | None = None) -> list[str]:
    """Differences of a case between fused and plain form on this rank; a collective call.

    Raises:
        RuntimeError: a transfer is still pending, so these processes cannot be used any more.
    """
    with quiet():
        ours = run_case(case, "fused", link)
        at_rest_or_raise(case, link)
        plain = run_case(case, "plain", link)
    return differences(ours, plain)


def distances(rank: int, case: Network) -> list[str]:
    """Results of a rounded network whose distance from fp64 exceeds the limit.

    The limit is relative to the largest value.  fp32: 1e-5, times ten for each further layer.
    Lower precision: 1.25 times the distance of the unsplit form, plus a quarter of epsilon.
    """
    with quiet():
        ours, unsplit, exact = (run_case(case, form) for form in ("fused", "unsplit", "exact"))
    messages = []
    for name, value in exact.items():
        if value is None or not value.numel():
            continue
        limit = 1e-6 * 10 ** len(case.layers)
        if case.dtype != torch.float32:
            limit = 1.25 * _distance(unsplit[name], value) + torch.finfo(case.dtype).eps / 4
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
