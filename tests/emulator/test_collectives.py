"""The collectives of the emulated HCCL against plain arithmetic, and sums against gloo's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulator.settings import Settings


def _of(rank: int, rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 2, dtype=torch.float32).view(rows, 2) + 100 * rank


def moves(rank: int) -> None:
    size = dist.get_world_size()
    everyone = [_of(r, 2) for r in range(size)]
    whole = torch.zeros(2 * size, 2)
    dist.all_gather_into_tensor(whole, everyone[rank])
    assert torch.equal(whole, torch.cat(everyone))
    dist.all_gather_single(whole, everyone[rank])
    assert torch.equal(whole, torch.cat(everyone))
    listed = [torch.zeros(2, 2) for _ in range(size)]
    dist.all_gather(listed, everyone[rank])
    assert torch.equal(torch.stack(listed), torch.stack(everyone))

    blocks = [_of(r, size) for r in range(size)]
    out = torch.zeros(size, 2)
    dist.all_to_all_single(out, blocks[rank])
    assert torch.equal(out, torch.stack([block[rank] for block in blocks]))
    rows = [r + 1 for r in range(size)]  # rank r gets r + 1 rows of everybody
    uneven = torch.zeros(size * (rank + 1), 2)
    mine = torch.full((sum(rows), 2), float(rank))
    dist.all_to_all_single(uneven, mine, [rank + 1] * size, rows)
    assert uneven[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]
    parts = [torch.zeros(1, 2) for _ in range(size)]
    dist.all_to_all(parts, list(blocks[rank].split(1)))
    assert torch.equal(torch.cat(parts), out)

    sent = _of(rank)
    dist.broadcast(sent, src=size - 1)
    assert torch.equal(sent, _of(size - 1))
    gathered = [torch.zeros(4, 2) for _ in range(size)] if rank == 1 else None
    dist.gather(_of(rank), gathered, dst=1)
    if gathered is not None:
        assert torch.equal(torch.stack(gathered), torch.stack([_of(r) for r in range(size)]))
    got = torch.zeros(4, 2)
    dist.scatter(got, [_of(r) for r in range(size)] if rank == 0 else None, src=0)
    assert torch.equal(got, _of(rank))
    dist.barrier()


def gathers_in_place(rank: int) -> None:
    """The input is a part of the output, as in Megatron's distributed optimizer."""
    size = dist.get_world_size()
    whole = torch.full((3 * size,), -1.0)
    mine = whole[3 * rank : 3 * rank + 3]
    mine.fill_(float(rank))
    dist.all_gather_into_tensor(whole, mine)
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(3)]


def objects(rank: int) -> None:
    size = dist.get_world_size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
    assert everyone == [{"rank": r, "text": "x" * r} for r in range(size)]
    told = [rank]
    dist.broadcast_object_list(told, src=1)
    assert told == [1]


def adds(rank: int) -> None:
    size = dist.get_world_size()
    for op, expected in (
        (dist.ReduceOp.SUM, sum(range(1, size + 1))),
        (dist.ReduceOp.MAX, size),
        (dist.ReduceOp.MIN, 1),
    ):
        total = torch.full((5,), rank + 1, dtype=torch.int32)
        dist.all_reduce(total, op=op)
        assert total.tolist() == [expected] * 5
    some = torch.full((5,), float(rank))
    dist.reduce(some, dst=0)
    assert rank or some.tolist() == [float(sum(range(size)))] * 5


def bits_of_gloo(rank: int) -> None:
    """Reduce-scatter adds in gloo's order; the gloo group is a second one over the same ranks."""
    size = dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(rank)
        whole = torch.randn(size * 6, generator=generator).to(dtype)
        ours, theirs = torch.zeros(6, dtype=dtype), torch.zeros(6, dtype=dtype)
        dist.reduce_scatter_single(ours, whole)
        dist.reduce_scatter_single(theirs, whole, group=gloo)
        assert torch.equal(ours, theirs)
    dist.destroy_process_group(gloo)


def coalesced(rank: int) -> None:
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [tensor[0].item() for tensor in tensors] == [3.0, 6.0]


def ask(rank: int) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    assert work.is_completed()


@pytest.mark.parametrize(
    "function", [moves, gathers_in_place, objects, adds, bits_of_gloo, coalesced, ask]
)
def test_equals_plain_arithmetic(emulated, function: Any) -> None:
    emulated(3, Settings(max_delay=0.0005)).run(function)
