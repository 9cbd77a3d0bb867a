"""What gloo lacks is made of what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal import gloo_for_hccl
from tests.distributed.ranks import Ranks


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one made as for HCCL, with the functions put back afterwards."""
    for name in gloo_for_hccl._REPLACED:
        for module in (dist, dist.distributed_c10d):
            monkeypatch.setattr(module, name, getattr(module, name))
    gloo_for_hccl.install()
    dist.init_process_group(
        "hccl", store=dist.HashStore(), rank=0, world_size=1, pg_options=object()
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("installed")
def test_groups_are_gloos_and_split_sizes_may_be_tensors() -> None:
    assert dist.get_backend() == "gloo"
    group = dist.new_group([0], backend="hccl", pg_options=object())
    assert dist.get_backend(group) == "gloo"
    output = torch.empty(3)
    dist.all_to_all_single(output, torch.arange(3.0), torch.tensor([3]), torch.tensor([3]))
    assert output.tolist() == [0.0, 1.0, 2.0]


def _freed(rank: int) -> list[float]:
    """An exchange whose input is overwritten and freed before the other rank takes part."""
    exchange = gloo_for_hccl._exchange(dist.all_to_all_single)
    output, sent = torch.empty(2), torch.full((2,), rank + 1.0)
    other = dist.new_group()  # a barrier waits for the transfers of its group
    if rank:
        dist.barrier(other)
    work = exchange(output, sent, async_op=True)
    if not rank:
        sent.fill_(-1.0)
        sent.untyped_storage().resize_(0)
        dist.barrier(other)
    work.wait()
    return output.tolist()


def test_what_is_sent_may_be_freed(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(_freed) == [[1.0, 2.0], [1.0, 2.0]]


def _reduced(rank: int, sizes: list[int]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """A gather of parts of these rows, the sum of what each rank makes of them, and an average."""
    gather = gloo_for_hccl._gather_uneven(dist.all_gather)
    parts = [torch.full((size, 2), -1.0) for size in sizes]
    gather(parts, torch.full((sizes[rank], 2), rank + 1.0), async_op=True).wait()
    total, mean = torch.empty(sizes[rank], 2), torch.full((2,), rank + 1.0)
    dist.reduce_scatter(total, [10**rank * part for part in parts])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return parts, total, mean


@pytest.mark.parametrize("sizes", [[3, 1], [0, 2], [2, 2]])
def test_parts_may_be_uneven_and_gloo_averages(
    ranks: Callable[[int], Ranks], sizes: list[int]
) -> None:
    full = [torch.full((size, 2), rank + 1.0) for rank, size in enumerate(sizes)]
    for rank, (parts, total, mean) in enumerate(ranks(2).run(_reduced, sizes)):
        assert all(map(torch.equal, parts, full))
        assert torch.equal(total, 11 * full[rank])
        assert mean.tolist() == [1.5, 1.5]
