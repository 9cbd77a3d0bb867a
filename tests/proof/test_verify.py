"""The verifier proves compiled programs and refutes faulty ones with a message."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
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
    Post,
    RecordEvent,
    Span,
    Wait,
    WaitEvent,
    accesses,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import (
    ColumnBackward,
    GatherGemm,
    GemmScatter,
    ProduceScatter,
    forget_programs,
)
from commfuse_npu.plan.rules.pieces import gather_pieces, scatter_pieces
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.proof.cases import CHUNKS, Case, cases
from commfuse_npu.proof.verify import counter_examples
from commfuse_npu.runtime.order_log import OrderLog
from commfuse_npu.tools.order_log.verify_log import verify_logs
from tests.proof.test_planted_faults import Code, altered, changed, group, replaced


def long(*sizes: int) -> list[Any]:
    return [pytest.param(size, CHUNKS, marks=pytest.mark.long) for size in sizes]


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        *((1, CHUNKS), (2, CHUNKS), (3, (1, 3)), (4, (2,)), (5, CHUNKS)),
        *long(3, 4, *range(6, 17)),
    ],
)
def test_every_rule_holds(tmp_path: Path, size: int, chunks: Sequence[int]) -> None:
    """Each set of programs is proved; one run of all is simulated by the rules of HCCL."""
    logs = [OrderLog(tmp_path, rank, size) for rank in range(size)]
    for case in cases(size, chunks):
        programs = case.programs()
        assert counter_examples(programs) == [], str(case)
        for log, program in zip(logs, programs, strict=True):
            transport = log.transport(range(size))  # its links are not open yet
            entry = log.program(transport, program, str(case), "torch.float32")
            for at, step in enumerate(program.code):
                if isinstance(step, Post | Collective | Wait):
                    entry("at", at)
            entry("finish")
        forget_programs()
    for log in logs:
        log.close()
    verdict = verify_logs([tmp_path])
    assert (verdict.faults, verdict.notes) == ([], [])


def test_slots_that_share_elements_are_refuted(monkeypatch) -> None:
    forget_programs()
    monkeypatch.setattr(program_module, "aligned", lambda elements: 0)
    faults = counter_examples(group(GemmScatter(2, 2, 4)))
    assert faults[0] == "rank 0: the memory of slab 0 and of made 0 overlaps"
    forget_programs()


# ---------------------------------------------------------------------- how much is computed


def counts(program: Program) -> tuple[int, int, int]:
    """GEMMs, sums and copies."""
    return program.count(Compute, "gemm"), program.count(Add), program.count(Copy)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_pieces_that_are_there_together_are_one_gemm(size: int, chunks: int) -> None:
    schedule, inner = Schedule(chunks=chunks), size // 2
    spec = RankSpec(schedule, inner, size)
    sides = 1 if size == 2 else 2

    gathered = GatherGemm(8, 2, 3).program(spec)
    pieces = gather_pieces(spec, 8)
    assert counts(gathered)[0] == len(pieces) == (1 + sides if chunks == 1 else 1 + chunks)
    assert counts(gathered)[2] == (0 if chunks == 1 or size == 2 else sides * chunks)
    assert pieces[0] == (slice(8 * inner, 8 * inner + 8),)
    scattered = GemmScatter(8, 2, 8).program(spec)
    assert counts(scattered) == (chunks + sides, chunks, 0)
    assert counts(scattered)[0] == len(scatter_pieces(spec, 8, 8))
    backward = ColumnBackward(8, 8, 3, True, True).program(spec)
    assert counts(backward) == (chunks, chunks, 1)
    assert backward.count(Compute, "wgrad") == 1
    # Blocks that are produced one by one are produced once per transfer, and the own block once.
    produced = ProduceScatter(8, 2).program(spec)
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


def left_out(data: st.DataObject, program: Program, code: Code) -> None:
    """Drop any instruction that accesses memory or orders others."""
    orders = Wait | RecordEvent | WaitEvent
    needed = {place for place, _ in _spans(program)}
    needed |= {place for place, step in enumerate(code) if isinstance(step, orders)}
    del code[data.draw(st.sampled_from(sorted(needed)))]


def other_rows(data: st.DataObject, program: Program, code: Code) -> None:
    """Shift any span of any instruction by one row."""
    place, span = data.draw(st.sampled_from(_spans(program)))
    moved = altered(span, start=span.start + 1, stop=span.stop + 1)
    code[place] = replaced(code[place], span, moved)


def another_transfer(data: st.DataObject, program: Program, code: Code) -> None:
    """Change any field of a transfer in any post or collective.

    A collective has both ends of what a rank keeps: other names at both are no fault.
    """
    places = [k for k, transfer in enumerate(code) if isinstance(transfer, Post | Collective)]
    assume(places)
    place = data.draw(st.sampled_from(places))
    _, (transfer, _) = data.draw(st.sampled_from(code[place].ends))
    assume(transfer.source != transfer.target)
    field = data.draw(st.sampled_from(["step", "lane", "source", "target", "piece"]))
    value = getattr(transfer, field)
    other = f"{value}, perhaps" if field == "piece" else value + 1
    code[place] = replaced(code[place], transfer, altered(transfer, **{field: other}))


@pytest.mark.parametrize("fault", [left_out, other_rows, another_transfer])
def test_any_fault_is_noticed(fault: Callable[[st.DataObject, Program, Code], None]) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(case=st.sampled_from(_RANDOM), data=st.data())
    def noticed(case: Case, data: st.DataObject) -> None:
        programs = case.programs()
        rank = data.draw(st.integers(0, case.size - 1))
        faulty = changed(programs, rank, partial(fault, data, programs[rank]))
        assert counter_examples(faulty), (str(case), str(programs[rank]), str(faulty[rank]))

    noticed()
