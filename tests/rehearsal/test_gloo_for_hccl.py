"""What gloo lacks is made of what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal import gloo_for_hccl
from tests.distributed.ranks import Ranks


@pytest.fixture
def installed() -> Iterator[None]:
    """A group of one made as for HCCL, with the functions put back afterwards."""
    names = tuple(gloo_for_hccl._REPLACED)
    before = {name: getattr(dist, name) for name in names}
    group: Any = dist.ProcessGroup
    get_backend = group._get_backend
    gloo_for_hccl.install()
    dist.init_process_group(
        "hccl", store=dist.HashStore(), rank=0, world_size=1, pg_options=object()
    )
    yield
    dist.destroy_process_group()
    group._get_backend = get_backend
    for name, function in before.items():
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)


@pytest.mark.usefixtures("installed")
def test_groups_are_gloos() -> None:
    assert dist.get_backend() == "gloo"
    group = dist.new_group([0], backend="hccl", pg_options=object())
    assert dist.get_backend(group) == "gloo"
    assert group._get_backend(torch.device("cuda")).get_hccl_comm_name(0) == group.group_name


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_averages(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    # As if there were four: the sum of one is itself, a quarter of it the average.
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    tensor = torch.full((2,), 8.0)
    handle = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=asynchronous)
    assert (handle is not None) is asynchronous
    if handle is not None:
        assert handle.wait()
    assert tensor.tolist() == [2.0, 2.0]
    output = torch.empty(2)
    dist.reduce_scatter_tensor(output=output, input=tensor, op=dist.ReduceOp.AVG)
    assert output.tolist() == [0.5, 0.5]
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    assert tensor.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("installed")
def test_split_sizes_may_be_tensors() -> None:
    output = torch.empty(3)
    dist.all_to_all_single(output, torch.arange(3.0), torch.tensor([3]), torch.tensor([3]))
    assert output.tolist() == [0.0, 1.0, 2.0]


def _freed(rank: int) -> list[float]:
    """An exchange whose input is overwritten and freed before the other rank takes part."""
    exchange = gloo_for_hccl._with_host_sizes(dist.all_to_all_single)
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


def _uneven(rank: int, sizes: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A gather of parts of these rows, and the sum of what each rank makes of them."""
    gather = gloo_for_hccl._gather_uneven(dist.all_gather)
    scatter = gloo_for_hccl._scatter_uneven(dist.reduce_scatter)
    parts = [torch.full((size, 2), -1.0) for size in sizes]
    gather(parts, torch.full((sizes[rank], 2), rank + 1.0), async_op=True).wait()
    total = torch.empty(sizes[rank], 2)
    scatter(total, [10**rank * part for part in parts])
    return parts, total


@pytest.mark.parametrize("sizes", [[3, 1], [0, 2], [2, 2]])
def test_parts_may_be_uneven(ranks: Callable[[int], Ranks], sizes: list[int]) -> None:
    whole = [torch.full((size, 2), rank + 1.0) for rank, size in enumerate(sizes)]
    for rank, (parts, total) in enumerate(ranks(2).run(_uneven, sizes)):
        assert all(map(torch.equal, parts, whole))
        assert torch.equal(total, 11 * whole[rank])
