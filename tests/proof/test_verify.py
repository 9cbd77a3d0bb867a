"""The verifier proves compiled programs and refutes faulty ones with a message."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commfuse_npu.plan import Schedule
from commfuse_npu.plan import program as program_module
from commfuse_npu.plan.instructions import (
    Add,
    Collective,
    Compute,
    Copy,
    Instruction,
    Post,
    RecordEvent,
    Span,
    Wait,
    WaitEvent,
    accesses,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import RULES
from commfuse_npu.plan.rules.pieces import gather_pieces, parts_of, scatter_pieces
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.proof.cases import CHUNKS, Case, cases
from commfuse_npu.proof.verify import counter_examples
from tests.proof.simulated import rendezvous
from tests.proof.test_planted_faults import group, put, replaced


def long(*sizes: int) -> list[Any]:
    return [pytest.param(size, CHUNKS, marks=pytest.mark.long) for size in sizes]


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        *((1, CHUNKS), (2, CHUNKS), (3, (1, 3)), (4, (2,)), (5, CHUNKS)),
        *long(3, 4, *range(6, 17)),
    ],
)
def test_every_rule_holds(size: int, chunks: Sequence[int]) -> None:
    for case in cases(size, chunks):
        programs = case.programs()
        assert counter_examples(programs) == [], str(case)
        assert rendezvous([programs]) is None, str(case)
        RULES[case.rule].cache_clear()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_may_be_under_way_on_the_same_lanes(size: int) -> None:
    """Operations that are in flight together, like buckets, or in turn."""
    for lanes, chunks, batched in product((1, 2, 3), (1, 2), (False, True)):
        make = partial(group, size=size, lanes=lanes, chunks=chunks, batched=batched)
        buckets = [make("bucket_scatter", 4, 1, 1), make("bucket_scatter", 6, 2, 2)]
        buckets += [make("bucket_gather", 4), make("bucket_gather", 6)]
        layers = [make("sharded_forward", 4, 2), make("sharded_backward", 4, 2, True, True)]
        linear = [make("gather_gemm", 4, 2, 3, None, 2), make("gemm_scatter", 4, 2, 4)]
        for operations in (buckets, layers, linear, [*layers, *buckets]):
            assert rendezvous(operations) is None


def test_a_rank_that_begins_in_another_order_gets_other_data() -> None:
    gathers, scatters = group("bucket_gather", 4), group("bucket_scatter", 4, 1, 1)
    crossed = [[gathers[0], scatters[1], scatters[2]], [scatters[0], gathers[1], gathers[2]]]
    words = "wrong data: rank 2 sends partial for 0 from rank 2 to rank 0 (step 0, lane 0)"
    assert words in str(rendezvous(crossed))


def test_slots_that_share_elements_are_refuted(monkeypatch) -> None:
    RULES["gemm_scatter"].cache_clear()
    monkeypatch.setattr(program_module, "aligned", lambda elements: 0)
    faults = counter_examples(group("gemm_scatter", 2, 2, 4))
    assert faults[0] == "rank 0: the memory of slab 0 and of made 0 overlaps"
    RULES["gemm_scatter"].cache_clear()


# ---------------------------------------------------------------------- how much is computed


def counts(program: Program) -> tuple[int, int, int]:
    """GEMMs, sums and copies."""
    return program.count(Compute, "gemm"), program.count(Add), program.count(Copy)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_pieces_that_are_there_together_are_one_gemm(size: int, chunks: int) -> None:
    schedule, inner = Schedule(chunks=chunks), size // 2
    spec = RankSpec(schedule, inner, size, True)
    sides = 1 if size == 2 else 2

    def of(rule: str, *given: object) -> Program:
        return RULES[rule](spec, *given)

    gathered = of("gather_gemm", 8, 2, 3, None, 2)
    pieces = gather_pieces(spec, 8)
    assert counts(gathered)[0] == len(pieces) == (1 + sides if chunks == 1 else 1 + chunks)
    assert counts(gathered)[2] == (0 if chunks == 1 or size == 2 else sides * chunks)
    assert pieces[0] == (slice(8 * inner, 8 * inner + 8),)
    scattered = of("gemm_scatter", 8, 2, 8)
    assert counts(scattered) == (chunks + sides, chunks, 0)
    assert counts(scattered)[0] == len(scatter_pieces(spec, 8, 8))
    backward = of("column_backward", 8, 8, 3, True, True)
    assert counts(backward) == (chunks, chunks, 1)
    assert backward.count(Compute, "wgrad") == 1
    reduced = of("gemm_all_reduce", 8 * size, 2, 3)
    assert counts(reduced) == (chunks + sides, chunks, 0)
    assert len(parts_of(spec, 8 * size)) == chunks
    # Blocks that are produced one by one are produced once per transfer, and the own block once.
    produced = of("produce_scatter", 8, 2)
    assert produced.count(Compute, "make") == (size - 1) * chunks + 1
    # With more than two chunks there is an intermediate sum.
    assert counts(produced)[1] == (chunks if chunks <= 2 else chunks + 1)


_RANDOM = [case for size in (2, 3, 4) for case in random.Random(size).sample(list(cases(size)), 40)]


def _spans(program: Program) -> list[tuple[int, Span]]:
    """All non-empty spans, each with the position of its instruction."""
    return [
        (place, span)
        for place, instruction in enumerate(program.code)
        for span in chain(*accesses(instruction))
        if span.rows
    ]


def left_out(data: st.DataObject, program: Program) -> tuple[int, list[Instruction]]:
    """Drop any instruction that accesses memory or orders others."""
    orders = Wait | RecordEvent | WaitEvent
    needed = {place for place, _ in _spans(program)}
    needed |= {place for place, step in enumerate(program.code) if isinstance(step, orders)}
    return data.draw(st.sampled_from(sorted(needed))), []


def other_rows(data: st.DataObject, program: Program) -> tuple[int, list[Instruction]]:
    """Shift any span of any instruction by one row."""
    place, span = data.draw(st.sampled_from(_spans(program)))
    moved = span._replace(start=span.start + 1, stop=span.stop + 1)
    return place, [replaced(program.code[place], span, moved)]


def another_transfer(data: st.DataObject, program: Program) -> tuple[int, list[Instruction]]:
    """Change any field of a transfer in any post or collective."""
    code = program.code
    places = [k for k, transfer in enumerate(code) if isinstance(transfer, Post | Collective)]
    assume(places)
    place = data.draw(st.sampled_from(places))
    _, (transfer, _) = data.draw(st.sampled_from(code[place].ends))
    field = data.draw(st.sampled_from(["step", "lane", "source", "target", "piece"]))
    value = getattr(transfer, field)
    changed = f"{value}, perhaps" if field == "piece" else value + 1
    return place, [replaced(code[place], transfer, transfer._replace(**{field: changed}))]


@pytest.mark.parametrize("fault", [left_out, other_rows, another_transfer])
def test_any_fault_is_noticed(fault: Callable[..., tuple[int, list[Instruction]]]) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(case=st.sampled_from(_RANDOM), data=st.data())
    def noticed(case: Case, data: st.DataObject) -> None:
        programs = case.programs()
        rank = data.draw(st.integers(0, case.size - 1))
        place, instead = fault(data, programs[rank])
        details = str(case), str(programs[rank]), place
        assert counter_examples(put(programs, rank, place, *instead)), details

    noticed()
