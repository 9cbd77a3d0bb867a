"""Schedules: order of the peers, chunks, lanes, and invalid options."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.plan import (
    PlanError,
    RankSpec,
    Schedule,
    block_rows,
    default_chunks,
    default_shape,
    min_rows_to_fuse,
    rules,
)
from commfuse_npu.plan.instructions import Collective, Post


def test_peers_are_taken_by_their_distance() -> None:
    """Partials arrive and are added in the order r-1, ..., r+1; sends to other nodes come first."""
    nodes = Schedule("two_level", node_size=2)
    for schedule, rank, size, own, hops in (
        (Schedule(), 1, 4, "first", [(2, 0), (3, 3), (0, 2)]),
        (Schedule(), 1, 4, "last", [(2, 0), (3, 3), (0, 2)]),
        (nodes, 0, 6, "first", [(1, 1), (2, 4), (3, 5), (4, 2), (5, 3)]),
        (nodes, 0, 6, "last", [(2, 4), (3, 5), (4, 2), (5, 3), (1, 1)]),
    ):
        assert [(hop.target, hop.source) for hop in schedule.hops(rank, size, own)] == hops
    lanes = {(hop.target, hop.lane) for hop in nodes.hops(0, 6, "first")}
    assert lanes == {(1, 0), (2, 1), (3, 1), (4, 1), (5, 1)}


@settings(deadline=None)
@given(rows=st.integers(1, 3000), parts=st.one_of(st.integers(1, 9), st.just(256)))
def test_chunks_cover_a_block_once_and_differ_by_one_unit(rows: int, parts: int) -> None:
    runs = Schedule(chunks=parts).runs(rows)
    assert [row for run in runs for row in range(run.start, run.stop)] == list(range(rows))
    assert len(runs) == min(rows, parts)
    unit = 16 if rows % 16 == 0 and rows >= 16 * parts else 1
    sizes = [run.stop - run.start for run in runs]
    assert max(sizes) - min(sizes) <= unit
    assert all(size % unit == 0 for size in sizes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "mesh"}, "'mesh' is unknown; choose one of shifted, two_level, coll"),
        ({"lanes": 0}, "lanes is 0; it must be a whole number from 1"),
        ({"chunks": 1.5}, "chunks is 1.5; it must be a whole number from 1"),
        ({"chunks": True}, "chunks is True"),
        ({"chunks": 257}, "chunks is 257"),
        ({"shape": "two_level"}, "two_level needs node_size"),
        ({"node_size": 2}, "node_size 2 has no meaning for the shape 'shifted'"),
        (
            {"shape": "collective", "lanes": 2},
            "lanes is 2; the shape collective uses one, leave lanes out",
        ),
        ({"shape": "two_level", "node_size": 4}, "group size 6 is not a multiple of node_size 4"),
        ({"shape": "collective", "causal": True}, "causal has no meaning for the shape 'coll"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Schedule(**options).hops(0, 6, "first")
    for rank, size in ((4, 4), (0, 0), (-1, 2)):
        with pytest.raises(PlanError, match=f"rank {rank} is outside a group of size {size}"):
            Schedule().hops(rank, size, "first")


def test_plan_and_proof_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from commfuse_npu.plan import RankSpec, Schedule, rules\n"
        "from commfuse_npu.proof import verify\n"
        "specs = [RankSpec(Schedule(), rank, 2) for rank in range(2)]\n"
        "programs = [rules.GemmScatter(4, 4, 4).program(spec) for spec in specs]\n"
        "assert not verify.counter_examples(programs)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_from_three_ranks_on_a_chunk_is_one_collective() -> None:
    assert [default_shape(size) for size in (2, 3, 8)] == ["shifted", "collective", "collective"]
    spec = RankSpec(Schedule(default_shape(4), chunks=2), 1, 4)
    program = rules.GatherGemm(4, 2, 3).program(spec)
    assert (program.count(Post), program.count(Collective), program.lanes) == (0, 2, 1)


def test_what_is_no_linear_layer_goes_by_batches() -> None:
    spec = RankSpec(Schedule("collective"), 0, 2)
    with pytest.raises(PlanError, match="for tensor-parallel linear layers only; choose shifted"):
        rules.ProduceScatter(4, 2).program(spec)


@pytest.mark.parametrize(
    ("size", "hidden", "microseconds", "rows"),
    [
        *((2, None, 128, 2048), (4, None, 128, 2500), (8, 8192, 128, 1024), (2, 2048, 128, 4096)),
        *((8, None, 40, 640), (3, None, 40, 781), (8, None, 15, 512), (2, None, 15, 256)),
    ],
)
def test_long_blocks_are_cut_in_two(size: int, hidden: int | None, microseconds, rows: int) -> None:
    """A slow host needs longer blocks."""
    seconds = microseconds * 1e-6
    assert min_rows_to_fuse(size, hidden, seconds) == rows
    cut = max(512, rows)
    assert [default_chunks(size, n, hidden, seconds) for n in (cut - 1, cut)] == [1, 2]
    assert min_rows_to_fuse(size, hidden) == min_rows_to_fuse(size, hidden, 128e-6)


@pytest.mark.parametrize(("context", "rows"), [(1, 2048), (2, 1024)])
def test_a_block_is_a_share_of_a_micro_batch(context: int, rows: int) -> None:
    assert block_rows(8192, 2, 8, context) == rows
