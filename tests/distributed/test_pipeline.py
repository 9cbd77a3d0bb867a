"""Pipelines against the unfused lines of their docstrings, on real gloo processes."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows
from commfuse_npu.runtime.pipeline import (
    exchange_and_consume,
    gather_and_consume,
    produce_and_exchange,
    produce_and_reduce,
)
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT

ROWS, COLUMNS = 7, 6


@lru_cache
def transport(batched: bool) -> Transport:
    """One per process and way of posting; made by all ranks at the same time."""
    return Transport.create(lanes=3, timeout=PATIENT, batched=batched)


def data(rank: int, rows: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(rows, COLUMNS, generator=generator).to(dtype)


def gather(rank: int, batched: bool, schedule: Schedule, dtype: torch.dtype, keep: bool) -> Any:
    link = transport(batched)
    plan = schedule.plan("gather", rank, link.size)
    shard = data(rank, ROWS, dtype)
    whole = all_gather_rows(shard, link.group)
    seen, got = [], torch.zeros_like(whole)
    gathered = torch.zeros_like(whole) if keep else None

    def consume(piece: torch.Tensor, rows: slice) -> None:
        seen.append(rows)
        got[rows] += piece

    gather_and_consume(shard, consume, transport=link, plan=plan, gathered=gathered)
    assert torch.equal(got, whole)
    assert seen == plan.computed_rows(ROWS)
    assert seen[0] == slice(rank * ROWS, (rank + 1) * ROWS), "own block not first"
    assert gathered is None or torch.equal(gathered, whole)
    assert not link._in_flight


def reduce(rank: int, batched: bool, schedule: Schedule, dtype: torch.dtype, fp32: bool) -> Any:
    link = transport(batched)
    plan = schedule.plan("reduce_scatter", rank, link.size)
    whole = data(rank, ROWS * link.size, dtype)
    everyone = all_gather_rows(whole, link.group).view(link.size, link.size, ROWS, COLUMNS)[:, rank]
    out = torch.full((ROWS, COLUMNS), float("nan"), dtype=dtype)
    seen = []

    def produce(rows: slice, to: torch.Tensor) -> None:
        seen.append(rows)
        to.copy_(whole[rows])

    produce_and_reduce(
        produce,
        out,
        transport=link,
        plan=plan,
        reduce_dtype=torch.float32 if fp32 else None,
    )
    assert seen[-1] == slice(rank * ROWS, (rank + 1) * ROWS), "own block not last"
    last = plan.transfers[-1].receive.piece if plan.transfers else None
    sources = [s.receive.source for s in plan.transfers if s.receive.piece == last]
    if schedule.shape == "ring":
        sources = [(rank - k) % link.size for k in range(1, link.size)]
    total = torch.zeros(ROWS, COLUMNS, dtype=torch.float32 if fp32 else dtype)
    for place, source in enumerate([*sources, rank]):
        total = everyone[source].to(total.dtype) if place == 0 else total + everyone[source]
    assert torch.equal(out, total.to(dtype))
    if not fp32 and schedule.shape != "two_level":
        assert torch.equal(out, reduce_scatter_rows(whole, link.group)), "not gloo's bits"


def exchange(rank: int, batched: bool, schedule: Schedule, dtype: torch.dtype, keep: bool) -> Any:
    link = transport(batched)
    blocks = data(rank, ROWS * link.size, dtype)
    whole = torch.empty_like(blocks)
    dist.all_to_all_single(whole, blocks, group=link.group)
    plan = schedule.plan("all_to_all", rank, link.size, own="first")
    got = torch.zeros_like(whole)
    received = torch.zeros_like(whole) if keep else None
    exchange_and_consume(
        blocks,
        lambda piece, rows: got[rows].add_(piece),
        transport=link,
        plan=plan,
        received=received,
    )
    assert torch.equal(got, whole)
    assert received is None or torch.equal(received, whole)
    out = torch.full_like(whole, float("nan"))
    plan = schedule.plan("all_to_all", rank, link.size, own="last")
    produce_and_exchange(lambda rows, to: to.copy_(blocks[rows]), out, transport=link, plan=plan)
    assert torch.equal(out, whole)


def schedules(size: int) -> list[Schedule]:
    nodes = [Schedule("two_level", 2, 2, order, 2) for order in ("block", "interleaved")]
    return [
        *(
            Schedule(shape, lanes, chunks, order)
            for shape, lanes, chunks, order in product(
                ("shifted", "ring"), (1, 2, 3), (1, 2, 3, 7), ("block", "interleaved")
            )
        ),
        *(nodes if size % 2 == 0 else []),
        *(Schedule("shifted", lanes, 3, taper=2) for lanes in (1, 3)),
        Schedule("ring", 2, 3, taper=1.5),
    ]


def every(
    rank: int, function: Any, batched: bool, size: int, flag: bool, dtype: torch.dtype
) -> None:
    for schedule in schedules(size):
        if function is reduce and flag and schedule.shape == "ring":
            continue
        function(rank, batched, schedule, dtype, flag)


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("function", [gather, reduce, exchange])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_the_collective(ranks, size, function, flag, batched) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ranks(size).run(every, function, batched, size, flag, dtype)
