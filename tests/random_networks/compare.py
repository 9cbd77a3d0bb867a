"""One case on one rank: fused against plain, bit for bit, and nothing left under way."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.random_networks.bucket_run import run_buckets
from tests.random_networks.case import BucketRun, Case
from tests.random_networks.network_run import run_network
from tests.random_networks.transports import at_rest, transport_of
from tests.random_networks.values import Found

__all__ = ["at_rest_or_raise", "complaints", "differences", "quiet", "run_case"]


def run_case(case: Case, fused: bool) -> Found:
    """What this rank computes."""
    return run_buckets(case, fused) if isinstance(case, BucketRun) else run_network(case, fused)


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


def at_rest_or_raise(case: Case) -> None:
    """Raise if a transfer is still under way: these processes are of no more use."""
    left = at_rest(transport_of(case))
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


def complaints(rank: int, case: Case) -> list[str]:
    """What is wrong with a case on this rank; every rank of the group calls it together.

    Raises:
        RuntimeError: a transfer is still under way, so that these processes are of no more use.
    """
    with quiet():
        ours = run_case(case, fused=True)
        at_rest_or_raise(case)
        plain = run_case(case, fused=False)
    return differences(ours, plain)
