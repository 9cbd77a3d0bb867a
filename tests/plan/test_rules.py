"""In which order the rules have things done, and what compiling them costs."""

from __future__ import annotations

import sys

import pytest

from commfuse_npu.plan import rules
from commfuse_npu.plan.instructions import Add, Compute, Wait
from commfuse_npu.plan.schedule import Place, Schedule


def at(rank: int, chunks: int) -> Place:
    return Place(Schedule(chunks=chunks), rank, 8, batched=True)


def test_the_sums_of_a_backward_come_behind_its_weight_gradient() -> None:
    program = rules.column_backward(at(3, 2), 64, 128, 256, True, True, True)
    works = [one.work if isinstance(one, Compute) else "add" for one in program.code
             if isinstance(one, Compute | Add)]  # fmt: skip
    assert works == ["gemm", "gemm", "wgrad", "add", "add"]
    first_wait = next(place for place, one in enumerate(program.code) if isinstance(one, Wait))
    assert first_wait > program.last_post, "everything is on its way before anything is awaited"


def test_receives_come_first_where_they_are_posted_by_themselves() -> None:
    place = Place(Schedule(chunks=2), 1, 4, batched=False)
    program = rules.gemm_scatter(place, 8, 16, 32)
    first_send = next(n for n, post in enumerate(program.posts) if post.send is not None)
    assert first_send == 2 * 3, "all receives have memory of their own"
    program = rules.gemm_scatter(place._replace(schedule=Schedule(chunks=4)), 8, 16, 32)
    first_send = next(n for n, post in enumerate(program.posts) if post.send is not None)
    assert first_send == 2 * 3, "two groups are under way; the others wait for their memory"


def test_scratch_of_two_groups_is_used_again() -> None:
    two, four = (
        rules.gemm_scatter(at(3, chunks), 64, 128, 4096).scratch_elements() for chunks in (2, 4)
    )
    assert four == two // 2


def test_a_program_reads_as_text() -> None:
    text = str(rules.gemm_scatter(Place(Schedule(), 0, 2, True), 4, 8, 8))
    assert text.splitlines() == [
        "gemm_scatter, rank 0 of 2",
        "   0  product 0[4:8] = gemm(a[4:8], weight[0:8, 0:8])",
        "   1  post step 0, lane 0: partial for 1 -> rank 1, partial for 0 <- rank 1",
        "   2  product 0[0:4] = gemm(a[0:4], weight[0:8, 0:8])",
        "   3  wait until received 0",
        "   4  out[0:4] = partials 0[0:4] + product 0[0:4]",
        "   5  wait until sent 0",
    ]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bucket_gather", (4099, False)),
        ("bucket_scatter", (4099, 1, 2)),
        ("sharded_backward", (67, 3, True, True)),
    ],
)
def test_compiling_takes_work_in_proportion_to_the_transfers(name, arguments, batched) -> None:
    """Counted in calls: of groups of hundreds of ranks each shape took seconds."""
    counts = []
    for size in (16, 128):
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        place = Place(Schedule(chunks=4, lanes=7), 1, size, batched)
        sys.setprofile(count)
        try:
            rules.RULES[name](place, *arguments)
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert counts[1] < 12 * counts[0]
