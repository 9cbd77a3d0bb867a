"""What a device would do with memory: buffers are not ready before, nor free until, their wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulator.settings import Settings


def _batch(rank: int, out: torch.Tensor, into: torch.Tensor) -> Any:
    """To the next rank of the job and from the one before; the handle."""
    size = dist.get_world_size()
    (work,) = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, out, (rank + 1) % size),
            dist.P2POp(dist.irecv, into, (rank - 1) % size),
        ]
    )
    return work


def early(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What a receive buffer holds before and after the wait."""
    into = torch.zeros(3, dtype=dtype)
    work = _batch(rank, torch.full((3,), rank + 5, dtype=dtype), into)
    before = into.clone()
    work.wait()
    work.wait()  # as on HCCL, a second one returns at once
    return before, into


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float64, None),
        (torch.uint8, 0x7F),
        (torch.int32, 0x7F7F7F7F),
        (torch.int64, 0x7F7F7F7F7F7F7F7F),
    ],
)
def test_reading_before_the_wait(emulated, dtype: torch.dtype, poison: int | None) -> None:
    for rank, (before, after) in enumerate(emulated(2).run(early, dtype)):
        if poison is None:
            assert before.isnan().all()
        else:
            assert before.tolist() == [poison] * 3
        assert after.tolist() == [(1 - rank) + 5] * 3


def early_collective(rank: int) -> list[torch.Tensor]:
    size = dist.get_world_size()
    whole, part = torch.zeros(2 * size), torch.zeros(2)
    works = [
        dist.all_gather_single(whole, torch.ones(2), async_op=True),
        dist.reduce_scatter_single(part, torch.ones(2 * size), async_op=True),
    ]
    before = [whole.clone(), part.clone()]
    for work in works:
        work.wait()
    return [*before, whole, part]


def test_reading_a_collective_before_the_wait(emulated) -> None:
    for gathered, reduced, whole, part in emulated(2).run(early_collective):
        assert gathered.isnan().all()
        assert reduced.isnan().all()
        assert whole.tolist() == [1.0] * 4
        assert part.tolist() == [2.0] * 2


def overwrites(rank: int, after_wait: bool) -> torch.Tensor:
    out, into = torch.full((3,), float(rank)), torch.zeros(3)
    work = _batch(rank, out, into)
    if after_wait:
        work.wait()
    out.fill_(-1.0)
    work.wait()
    dist.barrier()
    return into


def test_overwriting_a_send_buffer_before_the_wait(emulated) -> None:
    for into in emulated(2).run(overwrites, False):
        assert into.tolist() == [-1.0] * 3, "the fault did not show"
    for rank, into in enumerate(emulated(2).run(overwrites, True)):
        assert into.tolist() == [float(1 - rank)] * 3


def sends_to_a_reader(rank: int, key: str) -> torch.Tensor | None:
    """Rank 0 posts, goes on with something else, and waits when rank 1 has its data."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        out = torch.ones(3)
        work = dist.isend(out, 1)
        store.wait([key])
        out.fill_(-1.0)
        work.wait()
        return None
    into = torch.zeros(3)
    dist.irecv(into, 0).wait()
    store.set(key, "read")
    return into


@pytest.mark.parametrize("read_sends", ["wait", "match"])
def test_a_transfer_needs_no_wait_of_the_sender(emulated, read_sends: Any) -> None:
    """It moves while the sender's host does something else, as streams do."""
    ranks = emulated(2, Settings(read_sends=read_sends))
    assert ranks.run(sends_to_a_reader, read_sends)[1].tolist() == [1.0] * 3


def refused(rank: int, call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sends_bools() -> None:
    dist.isend(torch.ones(3, dtype=torch.bool), 1 - dist.get_rank())


def gathers_bools() -> None:
    dist.all_gather_single(torch.ones(2, dtype=torch.bool), torch.ones(1, dtype=torch.bool))


def sends_columns() -> None:
    dist.isend(torch.ones(3, 4)[:, 1], 1 - dist.get_rank())


def receives_into_columns() -> None:
    dist.irecv(torch.ones(3, 4).t(), 1 - dist.get_rank())


def adds_doubles() -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64))


def averages() -> None:
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.AVG)


def receives_from_anybody() -> None:
    dist.irecv(torch.ones(3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (sends_bools, "send: HCCL does not transfer bool; cast it to one of bfloat16, float16"),
        (gathers_bools, "all_gather: HCCL does not transfer bool"),
        (sends_columns, "shape (3,) and strides (4,) is not contiguous; pass tensor.contiguous()"),
        (receives_into_columns, "receive: a tensor of shape (4, 3) and strides (1, 4) is not"),
        (adds_doubles, "all_reduce: HCCL does not add up float64; cast it to one of bfloat16"),
        (averages, "HCCL has sums, products, maxima and minima, not AVG"),
        (receives_from_anybody, "name the source"),
    ],
)
def test_what_hccl_does_not_take(emulated, call: Callable[[], Any], words: str) -> None:
    for found in emulated(2).run(refused, call):
        assert found.startswith("RuleError: ")
        assert words in found
