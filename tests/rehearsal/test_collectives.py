"""Collectives that gloo lacks are emulated; each collective is counted once, by kind and group."""

import pytest
import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal import gloo_for_hccl
from mindspeed_patches.rehearsal.rehearsed_rank import CollectiveCounter
from tests.distributed.ranks import on_ranks


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace functions of ``torch.distributed`` until ``patch`` restores them."""
    for module in (dist, dist.distributed_c10d):
        for name, value in vars(module).items():
            if callable(value):
                patch.setattr(module, name, value)
    gloo_for_hccl.install()


@on_ranks(2)
def test_what_is_sent_may_be_freed(rank: int) -> None:
    """An exchange whose input is overwritten and freed before the other rank takes part."""
    output, sent = torch.empty(2), torch.full((2,), rank + 1.0)
    other = dist.new_group()  # a barrier waits for the transfers of its group
    if rank:
        dist.barrier(other)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        work = dist.all_to_all_single(output, sent, async_op=True)
    if not rank:
        sent.fill_(-1.0)
        sent.untyped_storage().resize_(0)
        dist.barrier(other)
    work.wait()
    assert output.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("sizes", [[3, 1], [0, 2], [2, 2]])
@on_ranks(2)
def test_parts_of_an_all_gather_may_be_uneven(rank: int, sizes: list[int]) -> None:
    parts = [torch.full((size, 2), -1.0) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        dist.all_gather(parts, torch.full((sizes[rank], 2), rank + 1.0), async_op=True).wait()
    full = [torch.full((size, 2), number + 1.0) for number, size in enumerate(sizes)]
    assert all(map(torch.equal, parts, full))


def test_groups_are_gloos_and_each_collective_is_counted_once(monkeypatch) -> None:
    install(monkeypatch)
    emulated = lambda tensor: dist.all_reduce(tensor)  # noqa: E731
    monkeypatch.setattr(dist, "reduce_scatter_tensor", emulated)
    counter, tensor = CollectiveCounter(), torch.ones(2)
    counter.install()
    hccl = {"backend": "hccl", "pg_options": object()}
    dist.init_process_group(**hccl, store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(tensor)  # not counted: the counter is inactive
        group = dist.new_group([0], group_desc="TENSOR_MODEL_PARALLEL_GROUP", **hccl)
        assert dist.get_backend() == dist.get_backend(group) == "gloo"
        counter.active = True
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
        dist.broadcast(tensor, 0)
        dist.all_gather_object([None], "object")
        output, size = torch.empty(3), torch.tensor([3])
        dist.all_to_all_single(output, torch.arange(3.0), size, size, group)
        assert output.tolist() == [0.0, 1.0, 2.0]
        assert dist.P2POp(dist.isend, tensor, 0, group).op is dist.isend  # torch accepts it
        with pytest.raises(RuntimeError):  # gloo refuses to send to itself
            dist.isend(tensor, 0, group)
        dist.reduce_scatter_tensor(tensor)
        # A collective that fails does not stop the count.
        with pytest.raises(TypeError):
            dist.all_reduce("no tensor")
        dist.all_reduce(tensor)
    finally:
        dist.destroy_process_group()
    assert counter.counts == {
        "tensor model parallel: all_reduce": 1,
        "tensor model parallel: all_to_all_single": 1,
        "tensor model parallel: isend": 1,
        "default pg: broadcast": 1,
        "default pg: all_gather_object": 1,
        "default pg: reduce_scatter_tensor": 1,
        "default pg: all_reduce": 2,
    }
