"""Transports: copies, bounds of their caches, lane streams, agreement of ranks, profiler ranges."""

import copy
import gc
from collections.abc import Iterable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.ops import Buckets, LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import forget_programs
from commfuse_npu.runtime import agreement, executor, post_time
from commfuse_npu.runtime import transport as runtime_transport
from commfuse_npu.runtime.gather_objects import gather_objects
from tests.distributed.programs import gather_and_use, new_link, transport, watch_calls
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT


def programs() -> int:
    """Number of programs that something still holds."""
    forget_programs()
    gc.collect()
    return sum(type(item) is Program for item in gc.get_objects())


@on_ranks(2)
def test_what_was_agreed_on_is_forgotten_alike(rank: int) -> None:
    link, compared = new_link(), list[object]()

    def gather(rows: int) -> None:
        y = all_gather_linear(torch.ones(rows, 4), torch.ones(3, 4), group=link)
        assert torch.equal(y, torch.full((2 * rows, 3), 4.0))

    with mock.patch.object(agreement, "_MOST_BEGUN", 3):
        before = programs()
        for rows in range(1, 6):
            gather(rows)
        link.scratch.clear()
        assert programs() <= before + 3
    with pytest.MonkeyPatch.context() as patch, mock.patch.object(agreement, "_MOST_AGREED", 3):
        watch_calls(patch, agreement, "gather_objects", lambda value, *_: compared.append(value))
        for rows in (1, 2, 3, 4, 5, 1, 2):
            gather(rows)
            link.agree("another", limit=float(rows))
    assert len(compared) > 1 + 5, "those that were forgotten are compared again"


@on_ranks(3)
def test_transferred_tensors_are_erased_after_their_wait(rank: int) -> None:
    """Recorded as (data pointer of the storage, number of HCCL lane streams)."""
    link, erased = new_link(), list[tuple[int, int]]()
    assert link.lane_streams is None, "gloo has none"

    def erase(tensors: Iterable[torch.Tensor], lanes: int) -> None:
        erased.extend((tensor.untyped_storage().data_ptr(), lanes) for tensor in tensors)

    link.lane_streams = SimpleNamespace(erase=erase)
    x = torch.ones(4, 3)
    all_gather_linear(x, torch.ones(2, 3), group=link)
    assert (x.untyped_storage().data_ptr(), 2) in erased
    # Buckets of one buffer: the last one to complete erases the buffer.
    buckets, buffer = Buckets(link), torch.ones(12)
    handles = [buckets.all_gather(bucket) for bucket in buffer.split(6)]
    erased.clear()
    handles[0].wait()
    assert erased == []
    handles[1].wait()
    assert erased == [(buffer.untyped_storage().data_ptr(), 2)]


@on_ranks(2)
def test_the_copy_of_a_module_uses_the_same_transport(rank: int) -> None:
    module = torch.nn.Linear(2, 2)
    module.transport = transport()
    assert copy.deepcopy(module).transport is module.transport


# ------------------------------------------------------------------- what ranks compare with


@on_ranks(3)
def test_everyone_hears_everyone_in_the_order_of_the_group(rank: int) -> None:
    group, pair, objects = dist.new_group(), dist.new_group([2, 0]), ["", "1" * 1000, "2" * 2000]
    # Without numpy, which torch does not require.
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("no numpy")):
        assert gather_objects(objects[rank], group, PATIENT) == objects
        assert gather_objects(None, group, PATIENT) == [None] * 3
    assert rank == 1 or gather_objects(rank, pair, PATIENT) == [0, 2]


@on_ranks(3)
def test_what_a_post_costs_is_the_same_on_all_ranks(rank: int) -> None:
    """The measured time of the slowest rank."""
    link = new_link(lanes=1)
    with mock.patch.object(post_time, "median", lambda seconds: len(seconds) + rank):
        assert post_time.post_seconds(link, Schedule()) == 18
    assert post_time.post_seconds(link, Schedule()) > 0


SCHEDULES = [
    Schedule("collective"),
    Schedule(lanes=2),
    Schedule(lanes=3),
    Schedule("two_level", node_size=2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@on_ranks(4)
def test_programs_post_what_was_warmed_up_and_measured(rank: int, schedule: Schedule) -> None:
    """Kind and lane of each post, and the peer of a batch."""
    posts: set[tuple[object, ...]] = set()

    def posted() -> set[tuple[object, ...]]:
        known = {id(lane): number for number, lane in enumerate(link.lane_groups)}
        found = {(kind, known[lane], peer) for kind, lane, peer in posts}
        posts.clear()
        return found

    def batch(operations: list[dist.P2POp]) -> None:
        posts.update((p2p.op.__name__, id(p2p.group), p2p.peer) for p2p in operations)

    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, dist, "batch_isend_irecv", batch)
        for kind in ("begin_all_gather", "begin_all_to_all"):
            for module in (executor, post_time, runtime_transport):
                note = lambda _, lane, *__, kind=kind: posts.add((kind, id(lane), None))  # noqa: E731
                watch_calls(patch, module, kind, note)
        link = new_link(lanes=schedule.lanes_for(4), shape=schedule.shape)
        warmed_up = posted()
        post_time.post_seconds(link, schedule)
        measured = posted()
        options = LinearOptions(schedule)
        x = all_gather_linear(torch.ones(2, 4), torch.ones(3, 4), group=link, options=options)
        linear_reduce_scatter(x, torch.ones(4, 3), group=link, options=options)
        run = posted()
    assert measured == run
    assert run <= warmed_up
    kinds = {kind for kind, *_ in warmed_up}
    assert len(kinds & {"begin_all_gather", "begin_all_to_all"}) in (0, len(kinds))


@on_ranks(2)
def test_the_profiler_shows_an_operation_by_its_name(rank: int) -> None:
    link = transport()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gather_and_use(link, torch.ones(2, 2), lambda *_: None)
    names = [event.name for event in profile.events() if event.name.startswith("CommFuse")]
    assert names == ["CommFuse: gather_and_use"]
