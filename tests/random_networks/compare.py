"""One case on one rank: fused against plain, bit for bit, or in fp64; nothing left under way."""

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
    """What this rank computes; ``link``: by default that of the case."""
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
    """Empty inputs, and inputs without gradients under a recomputation, are meant here."""
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
    """Raise if a transfer is still under way: these processes are of no more use."""
    left = at_rest(link or transport_of(case))
    if left:
        raise RuntimeError("; ".join(left))


def differences(ours: Found, plain: Found) -> list[str]:
    """Where what was computed is not what it should be."""
    found = [f"{name} is missing" for name in plain.keys() - ours.keys()]
    found += [f"{name} is not in the plain form" for name in ours.keys() - plain.keys()]
    for name in plain:
        if name in ours:
            difference = _difference(ours[name], plain[name])
            if difference is not None:
                found.append(f"{name}: {difference}")
    return found


def complaints(rank: int, case: Case, link: Transport | None = None) -> list[str]:
    """What is wrong with a case on this rank; every rank of the group calls it together.

    Raises:
        RuntimeError: a transfer is still under way, so that these processes are of no more use.
    """
    with quiet():
        ours = run_case(case, "fused", link)
        at_rest_or_raise(case, link)
        plain = run_case(case, "plain", link)
    return differences(ours, plain)


def distances(rank: int, case: Network) -> list[str]:
    """What of a rounded network is further from fp64 than the plain form's rounding.

    fp32 may be 1e-5 of the largest value away, ten times that for each further layer; fewer bits a
    quarter more than what collectives and whole matrices are, and a quarter of the last place.
    """
    with quiet():
        ours, unsplit, exact = (run_case(case, form) for form in ("fused", "unsplit", "exact"))
    found = []
    for name, value in exact.items():
        if value is None or not value.numel():
            continue
        limit = 1e-6 * 10 ** len(case.layers)
        if case.dtype != torch.float32:
            limit = 1.25 * _distance(unsplit[name], value) + torch.finfo(case.dtype).eps / 4
        if not (away := _distance(ours[name], value)) <= limit:
            found.append(f"{name} is off by {away:.2e}, not {limit:.2e} at most")
    return found


def _distance(ours: torch.Tensor | None, exact: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert ours is not None
    most = float(exact.abs().max()) or 1.0
    return float((ours.double() - exact).abs().max()) / most


def in_full(rank: int, cases: Sequence[Network]) -> list[str]:
    """What is wrong with rounded networks: their bits, or their distance from fp64."""
    return [
        f"{case}: {line}"
        for case in cases
        for line in (*complaints(rank, case), *distances(rank, case))
    ]
