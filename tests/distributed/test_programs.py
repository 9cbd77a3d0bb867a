"""Programs with a test's own work against the unfused lines of their rules, on gloo processes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules.pieces import made_pieces, used_pieces
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import gather_and_use, make_and_scatter, transport
from tests.distributed.ranks import on_ranks

ROWS, COLUMNS = 7, 6


def data(rank: int, rows: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(rows, COLUMNS, generator=generator).to(dtype)


def gather(rank: int, link: Transport, schedule: Schedule, dtype: torch.dtype) -> None:
    shard = data(rank, ROWS, dtype)
    whole = all_gather_rows(shard, link.group)
    seen, got = [], torch.zeros_like(whole)

    def use(piece: torch.Tensor, rows: slice) -> None:
        seen.append(rows)
        got[rows] += piece

    gather_and_use(link, shard, use, schedule)
    assert torch.equal(got, whole)
    assert seen == used_pieces(link.place(schedule), ROWS)
    assert seen[0] == slice(rank * ROWS, (rank + 1) * ROWS), "own block not first"
    assert not link._in_flight


def scatter(rank: int, link: Transport, schedule: Schedule, dtype: torch.dtype) -> None:
    whole = data(rank, ROWS * link.size, dtype)
    everyone = all_gather_rows(whole, link.group).view(link.size, link.size, ROWS, COLUMNS)[:, rank]
    for sum_dtype in (None, torch.float32):
        out = torch.full((ROWS, COLUMNS), float("nan"), dtype=dtype)
        seen = []

        def make(to: torch.Tensor, rows: slice, seen: list[slice] = seen) -> None:
            seen.append(rows)
            to.copy_(whole[rows])

        make_and_scatter(link, make, out, schedule, sum_dtype)
        assert seen == made_pieces(link.place(schedule), ROWS)
        assert seen[-1] == slice(rank * ROWS, (rank + 1) * ROWS), "own block not last"
        sources = [
            hop.source for hop in link.place(schedule).schedule.hops(rank, link.size, "last")
        ]
        total = torch.zeros(ROWS, COLUMNS, dtype=sum_dtype or dtype)
        for place, source in enumerate([*sources, rank]):
            total = everyone[source].to(total.dtype) if place == 0 else total + everyone[source]
        assert torch.equal(out, total.to(dtype))
        if sum_dtype is None and schedule.shape != "two_level" and schedule.costs is None:
            assert torch.equal(out, reduce_scatter_rows(whole, link.group)), "not gloo's bits"


def schedules(size: int) -> list[Schedule]:
    return [
        *(Schedule("shifted", lanes, chunks) for lanes, chunks in product((1, 3), (1, 2, 3, 40))),
        *([Schedule("two_level", 2, 2, node_size=2)] if size % 2 == 0 else []),
        *(Schedule("shifted", 2, 3, taper=taper) for taper in (2, 0.5)),
        Schedule().for_causal_blocks(size),
    ]


def every(rank: int, function: Any, batched: bool, size: int) -> None:
    for schedule, dtype in product(schedules(size), (torch.float32, torch.bfloat16)):
        function(rank, transport(batched), schedule, dtype)


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("function", [gather, scatter])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_the_collective(ranks, size: int, function: Any, batched: bool) -> None:
    ranks(size).run(every, function, batched, size)


@on_ranks(2)
def test_the_profiler_shows_an_operation_by_its_name(rank: int) -> None:
    link = transport(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gather_and_use(link, data(rank, ROWS, torch.float32), lambda *_: None, Schedule())
    found = [event.name for event in profile.events() if event.name.startswith("CommFuse")]
    assert found == ["CommFuse: gather_and_use"]
