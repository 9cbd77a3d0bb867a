"""The measurement of what a transfer costs the host measures what it says."""

from __future__ import annotations

import math

import torch

from commfuse_npu import Transport
from scripts.evidence.host_overhead import Overhead, measure
from tests.limits import PATIENT


def _measured(rank: int) -> tuple[list[Overhead], int]:
    link = Transport.create(lanes=1, timeout=PATIENT)
    with torch.no_grad():
        found = measure(link, calls=2)
    operations = link.operations
    link.close()
    return found, operations


def test_host_overhead_of_both_ops(ranks) -> None:
    for found, operations in ranks(2).run(_measured):
        assert [one.op for one in found] == ["all_gather_linear", "linear_reduce_scatter"]
        assert all(math.isfinite(one.op_us) and one.op_us > 0 for one in found)
        assert operations == 2 * 2 * (2 + 10), "two ops, few and many chunks, warm-up included"
