"""The layers written out by hand do what the programs do, and both are measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Transport
from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.plan import Schedule
from scripts.evidence import host_overhead
from scripts.evidence.hand_written import Setting, column_layer, row_layer
from tests.distributed.ranks import Ranks
from tests.limits import PATIENT


def both(rank: int, chunks: int) -> None:
    """Bitwise the same, forward and backward, in batches."""
    link = Transport.create(timeout=PATIENT, batched=True)
    options = LinearOptions(Schedule(chunks=chunks))
    lanes = list(link.lane_groups)
    for op, by_hand, rows in (
        (all_gather_linear, column_layer, 8),
        (linear_reduce_scatter, row_layer, 8 * link.size),
    ):
        results: list[list[torch.Tensor]] = []
        for fused in (True, False):
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(rows, 32, generator=generator).requires_grad_()
            weight = torch.randn(64, 32, generator=generator).requires_grad_()
            if fused:
                y = op(x, weight, transport=link, options=options)
            else:
                setting = Setting(lanes, rank, link.size, 8, chunks, {})
                function, arguments = by_hand(setting, x, weight)
                y = function.apply(*arguments)
            y.backward(torch.randn(y.shape, generator=generator))
            results.append([y.detach(), x.grad, weight.grad])
        assert all(map(torch.equal, *results)), op.__name__


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_by_hand_is_the_same_layer(ranks: Any, chunks: int) -> None:
    group: Ranks = ranks(3)
    group.run(both, chunks)


def test_every_op_is_measured_beside_the_one_by_hand() -> None:
    found = host_overhead.measure(ranks=4, calls=1, chunks=(1, 2), flows=(2, 4))
    assert [(one.op, one.direction, one.chunks) for one in found] == [
        (op, direction, chunks)
        for op in ("all_gather_linear", "linear_reduce_scatter")
        for chunks in (1, 2)
        for direction in ("forward", "backward")
    ] + [
        ("layer that flows", direction, chunks)
        for chunks in (2, 4)
        for direction in ("forward", "backward")
    ]
    assert all(math.isfinite(one.ratio) and one.hand_us > 0 for one in found)
    assert not dist.is_initialized()


def test_a_line_per_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_overhead.main(["--ranks", "2", "--calls", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks, stand-in group")
    assert len(lines) == 1 + 2 * 3 * 2 + 2
    assert all(line.endswith("x") for line in lines[1:])


def test_denormal_numbers_are_as_before() -> None:
    host_overhead.measure(ranks=2, calls=1, chunks=(1,), flows=())
    assert torch.tensor(1e-40) / 2 > 0
