"""Lanes come and go with Megatron's groups, and leave the other groups alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions, all_gather_linear
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.lanes import ContextParallelLanes, DataParallelLanes, TensorParallelLanes
from mindspeed_patches.ulysses import UlyssesWrappers


def patched(lanes: int) -> tuple[LinearWrappers, PatchManager]:
    wrappers, manager = LinearWrappers(), PatchManager()
    TensorParallelLanes(wrappers, lanes).register(manager)
    manager.apply_patches()
    return wrappers, manager


def life_of_the_lanes(rank: int) -> list[Any]:
    from megatron.core import parallel_state

    wrappers, manager = patched(lanes=2)
    try:
        seen: list[Any] = [wrappers.transport is None]
        for size in (2, 4):
            parallel_state.initialize_model_parallel(size, distributed_timeout_minutes=3)
            transport = wrappers.transport
            assert transport is not None
            seen.append((transport.size, transport.lanes, transport.timeout.total_seconds()))
            parallel_state.destroy_model_parallel()
            seen.append(wrappers.transport is None)
        return seen
    finally:
        manager.remove_patches()


def test_made_with_the_groups_and_given_up_with_them(ranks) -> None:
    for seen in ranks(4).run(life_of_the_lanes):
        assert seen == [True, (2, 2, 180.0), True, (4, 2, 180.0), True]


def recorded_lanes(rank: int, folder: str) -> tuple[bool, int]:
    from megatron.core import parallel_state

    wrappers, manager = LinearWrappers(), PatchManager()
    lanes = TensorParallelLanes(wrappers, 1)
    lanes.order_log = folder
    lanes.register(manager)
    manager.apply_patches()
    try:
        for _ in range(2):
            parallel_state.initialize_model_parallel(2)
            assert wrappers.transport is not None
            recorded = wrappers.transport.order_log is not None
            parallel_state.destroy_model_parallel()
    finally:
        manager.remove_patches()
    log = shared_order_log(folder, rank, dist.get_world_size())
    log.close()
    return recorded, len(log.path.read_text().splitlines())


def test_what_goes_over_the_lanes_is_recorded_where_it_is_asked_for(ranks, tmp_path) -> None:
    # The first line, two transports made and given up, and the end.
    assert ranks(2).run(recorded_lanes, str(tmp_path / "log")) == [(True, 6)] * 2


def lanes_of_two_groups(rank: int) -> list[Any]:
    from megatron.core import parallel_state

    wrappers, manager = patched(lanes=1)
    ulysses = UlyssesWrappers(wrappers)
    ContextParallelLanes(ulysses, lanes=2).register(manager)
    manager.apply_patches()
    try:
        parallel_state.initialize_model_parallel(2, context_parallel_size=2)
        assert wrappers.transport is not None
        assert ulysses.transport is not None
        assert ulysses.transport.group is parallel_state.get_context_parallel_group()
        made = [(t.ranks, t.lanes) for t in (wrappers.transport, ulysses.transport)]
        parallel_state.destroy_model_parallel()
        return [*made, wrappers.transport, ulysses.transport]
    finally:
        manager.remove_patches()


def test_context_parallel_groups_have_lanes_of_their_own(ranks) -> None:
    for rank, found in enumerate(ranks(4).run(lanes_of_two_groups)):
        tensor_parallel = (rank // 2 * 2, rank // 2 * 2 + 1)
        context_parallel = (rank % 2, rank % 2 + 2)
        assert found == [(tensor_parallel, 1), (context_parallel, 2), None, None]


def lanes_of_replicas(rank: int) -> list[Any]:
    from megatron.core import parallel_state

    wrappers, manager = patched(lanes=1)
    buckets = BucketWrappers(wrappers)
    directions = buckets.gradients, buckets.parameters
    for direction in directions:
        DataParallelLanes(direction, lanes=None).register(manager)
    manager.apply_patches()
    try:
        parallel_state.initialize_model_parallel(1, context_parallel_size=2)
        group = parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        )
        made = [direction.lanes() for direction in directions]
        assert all(transport.group is group for transport in made)
        assert made[0] is not made[1]
        found = [(transport.ranks, transport.lanes) for transport in made]
        # What is exchanged goes over the transport that is there now.
        before = [direction.buckets() for direction in directions]
        assert before == [direction.buckets() for direction in directions]
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1)
        assert all(direction.buckets() not in before for direction in directions)
        parallel_state.destroy_model_parallel()
        return [*found, *(direction.transport for direction in directions)]
    finally:
        manager.remove_patches()


def test_replicas_have_lanes_of_their_own_for_each_direction(ranks) -> None:
    everyone = ((0, 1, 2, 3), 3)
    assert ranks(4).run(lanes_of_replicas) == [[everyone, everyone, None, None]] * 4


def beside_the_other_groups(rank: int, sizes: dict[str, int]) -> float:
    """A fused layer while pipeline and context-parallel traffic is under way."""
    from megatron.core import parallel_state

    wrappers, manager = patched(lanes=1)
    try:
        parallel_state.initialize_model_parallel(2, **sizes)
        transport = wrappers.transport
        assert transport is not None
        if "pipeline_model_parallel_size" in sizes:
            other = parallel_state.get_pipeline_model_parallel_group()
        elif "context_parallel_size" in sizes:
            other = parallel_state.get_context_parallel_group()
        else:
            other = parallel_state.get_expert_model_parallel_group()
        peer = next(r for r in dist.get_process_group_ranks(other) if r != rank)
        x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(rank))
        weight = torch.randn(12, 16, generator=torch.Generator().manual_seed(9))
        incoming, total = torch.empty(5), torch.full((3,), float(rank))
        works = [
            dist.irecv(incoming, peer, other),
            dist.all_reduce(total, group=other, async_op=True),
        ]
        options = LinearOptions(Schedule(lanes=1, chunks=2))
        fused = all_gather_linear(x, weight, transport=transport, options=options)
        works.append(dist.isend(torch.full((5,), float(rank)), peer, other))
        for work in works:
            work.wait()
        collectives = CollectiveTransport(transport.group, same_pieces=True)
        plain = all_gather_linear(x, weight, transport=collectives, options=options)
        assert torch.equal(fused, plain)
        assert incoming.tolist() == [float(peer)] * 5
        assert total.tolist() == [float(rank + peer)] * 3
        parallel_state.destroy_model_parallel()
        return float(peer)
    finally:
        manager.remove_patches()


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"expert_model_parallel_size": 2},
    ],
    ids=lambda sizes: next(iter(sizes)),
)
def test_other_groups_keep_working(ranks, sizes: dict[str, int]) -> None:
    assert ranks(4).run(beside_the_other_groups, sizes) == [2.0, 3.0, 0.0, 1.0]


def without_gloo_groups(rank: int) -> list[float]:
    """MindSpeed's --disable-gloo-group makes ``new_group`` return None for gloo by keyword."""
    new_group, made = dist.new_group, []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        # Here the device's backend is gloo too: only the first request for gloo is the control's.
        made.append(kwargs.get("pg_options", "control"))
        if made[-1] == "control" and made.count("control") == 1:
            return None
        return new_group(*args, **kwargs)

    with mock.patch.object(dist, "new_group", replaced):
        transport = Transport.create(lanes=1)
    assert made == [None, "control", "control"]
    x = torch.full((4, 1, 3), float(rank + 1))
    options = LinearOptions(Schedule(lanes=1))
    gathered = all_gather_linear(x, torch.eye(3), transport=transport, options=options)
    return gathered[::4, 0, 0].tolist()


def test_where_gloo_groups_are_switched_off(ranks) -> None:
    assert ranks(2).run(without_gloo_groups) == [[1.0, 2.0]] * 2
