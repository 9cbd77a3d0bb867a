"""Random cases on an emulated HCCL: orders that gloo takes without complaint would hang here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.random_networks.case import Bucket, BucketRun, Case
from tests.random_networks.compare import complaints


def _on_hccl(bucket: Bucket) -> Bucket:
    """Its reduce-scatter, which is the reference, knows no fp64."""
    return replace(bucket, dtype=torch.float32) if bucket.dtype == torch.float64 else bucket


def in_batches(rank: int, case: Case) -> list[str]:
    """As HCCL wants transfers to be posted, whatever the case says."""
    if isinstance(case, BucketRun):
        case = replace(case, buckets=tuple(_on_hccl(bucket) for bucket in case.buckets))
    return complaints(rank, replace(case, batched=True))


def nothing(rank: int) -> None:
    """For the check that nothing is left over from before."""


@pytest.mark.parametrize(("size", "cases"), [(2, 12), (3, 6)])
def test_fused_is_plain(random_cases, ranks, size: int, cases: int) -> None:
    random_cases(size, cases, seed=910, compare=in_batches)
    ranks(size).run(nothing)
