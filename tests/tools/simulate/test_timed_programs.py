"""The simulator times the programs that run: their transfers and work, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import (
    Add,
    Compute,
    Copy,
    Post,
    RecordEvent,
    Span,
    Wait,
    WaitEvent,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import column_backward, gather_gemm, gemm_scatter
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.tools.simulate import linear, llama
from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE, Links, Operation
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank, rest
from commfuse_npu.tools.simulate.variants import Variant
from tests.tools.simulate.machines import ideal

SIZE, ROWS, INPUTS, OUTPUTS = 6, 8, 48, 60
SHAPE = LayerShape(SIZE * ROWS, SIZE * ROWS, 1, 48, 96, 144, 60, SIZE)

SCHEDULES = [
    Schedule("shifted", 2, 1),
    Schedule("shifted", 3, 4),
    Schedule("shifted", 5, 2, taper=2.0),
    Schedule("two_level", 3, 2, node_size=3),
]

WORKS = {Copy: "copy", Add: "sum", WaitEvent: "hold"}
Build = Callable[[Rank], None]
Made = Callable[[RankSpec], Program]


def _linear(part: str) -> Build:
    build = getattr(linear, part)
    return lambda rank: rest(build(rank, "x", ROWS, INPUTS, OUTPUTS) or iter(()))


CASES: dict[str, tuple[Build, Made]] = {
    "column": (_linear("column"),
               lambda at: gather_gemm(at, ROWS, INPUTS, OUTPUTS, None, 0)),
    "row": (_linear("row"), lambda at: gemm_scatter(at, ROWS, INPUTS, OUTPUTS)),
    "column gradients": (_linear("column_gradients"),
                         lambda at: column_backward(at, ROWS, INPUTS, OUTPUTS, True, True)),
    "row gradients": (_linear("row_gradients"),
                      lambda at: gather_gemm(at, ROWS, OUTPUTS, INPUTS, "whole", INPUTS)),
}  # fmt: skip


@pytest.mark.parametrize("batched", [True, False], ids=["in batches", "one by one"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_timed_is_the_program(case: str, schedule: Schedule, batched: bool) -> None:
    build, make_program = CASES[case]
    for number in range(SIZE):
        machine = replace(ideal(), batched=batched)
        rank = Rank(Links(machine, SIZE), number, Variant("fused", "fused", schedule))
        build(rank)
        operations = iter(enumerate(rank.finish()))
        compare(operations, make_program(RankSpec(schedule, number, SIZE, batched)))
        assert {operation.name for _, operation in operations} <= {"end"}


def compare(operations: Iterator[tuple[int, Operation]], program: Program) -> None:
    """One operation per instruction; a transfer starts after the work that precedes it."""
    posted: dict[tuple[str, int], int] = {}
    events: dict[int, int | None] = {}
    needed: dict[bool, set[int | None]] = {False: set(), True: set()}
    last: dict[bool, int | None] = {False: None, True: None}
    for instruction in program.code:
        if isinstance(instruction, Wait):
            ends = [("receive", step) for step in instruction.receives]
            ends += [("send", step) for step in instruction.sends]
            needed[instruction.on_side_stream] |= {posted[end] for end in ends}
        elif isinstance(instruction, RecordEvent):
            events[instruction.event] = last[instruction.on_side_stream]
        elif isinstance(instruction, Post):
            at, operation = next(operations)
            assert {last[False]} <= {None, *operation.after}
            messages = {"send": operation.sends, "receive": operation.receives}
            for way, (transfer, span) in instruction.ends:
                (message,) = messages[way]
                size = span.rows * width(program, span) * ITEM_BYTES
                assert message[1:4] == (transfer.source, transfer.target, size)
                posted[way, transfer.step] = at
                if program.batched or way == "send":
                    assert operation.engine == f"lane {transfer.lane}"
        elif isinstance(instruction, Compute | Copy | Add | WaitEvent):
            on_side = not isinstance(instruction, Compute) and instruction.on_side_stream
            is_work = isinstance(instruction, Compute)
            kind = instruction.work if is_work else WORKS[type(instruction)]
            if isinstance(instruction, WaitEvent):
                needed[on_side].add(events[instruction.event])
            # Each addition takes a pass of its own.
            terms = instruction.terms if isinstance(instruction, Add) else ()
            for _ in range(max(1, sum(parts for _, parts in terms) - 1)):
                last[on_side], operation = next(operations)
                assert operation.name == f"x {kind}"
                assert operation.engine == (ASIDE if on_side else COMPUTE)
                assert needed[on_side] <= {None, *operation.after}
                needed[on_side] = set()


def width(program: Program, span: Span) -> int:
    """Columns of a transferred span."""
    scratch = {buffer.name: buffer.columns for buffer in program.scratch}
    arguments = program.arguments
    columns = arguments.get("outputs") if span.buffer == "out" else arguments.get("inputs")
    return scratch.get(span.buffer) or columns or arguments["columns"]


@pytest.mark.parametrize("rounded", [False, True])
def test_a_layer_gathers_its_inputs_ahead(rounded: bool) -> None:
    """Posted after all transfers of the row-parallel layer, before its last weight gradient."""
    variant = Variant("x", "fused", Schedule(lanes=5, chunks=2), rounded)
    rank = Rank(Links(ideal(), SIZE), 1, variant)
    llama.backward(rank, SHAPE)
    names = [operation.name for operation in rank.finish()]
    for row, column in (("fc2", "fc1"), ("proj", "qkv")):
        posts, ahead = (
            [at for at, name in enumerate(names) if name.startswith(f"{layer} backward block")]
            for layer in (row, column)
        )
        last = max(at for at, name in enumerate(names) if name == f"{row} backward wgrad")
        assert len(ahead) == SIZE - 1
        assert max(posts) < min(ahead) <= max(ahead) < last
