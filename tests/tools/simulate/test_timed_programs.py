"""What is timed is the program: its transfers and its work, in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Compute, Post, Span
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import (
    column_backward,
    exchange,
    gather_gemm,
    gather_use,
    gemm_scatter,
    produce_scatter,
)
from commfuse_npu.plan.schedule import Place
from commfuse_npu.tools.simulate import linear, llama
from commfuse_npu.tools.simulate.context_parallel import ContextParallel
from commfuse_npu.tools.simulate.launches import COMPUTE, Operation
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank, rest
from commfuse_npu.tools.simulate.variants import Variant, Wgrad
from tests.tools.simulate.machines import ideal

SIZE, ROWS, INPUTS, OUTPUTS = 6, 8, 48, 60
SHAPE = LayerShape(SIZE * ROWS, SIZE * ROWS, 1, 48, 96, 144, 60, SIZE)
PART = LayerShape(ROWS, SIZE * ROWS, 1, 48, 96, 144, 60, 1)
"""Of a context-parallel rank."""

SCHEDULES = [
    Schedule("shifted", 2, 1),
    Schedule("shifted", 3, 4),
    Schedule("shifted", 5, 2, taper=2.0),
    Schedule("two_level", 3, 2, node_size=3),
]

Build = Callable[[Rank], None]
Made = Callable[[Place], list[Program]]


def _linear(part: str) -> Build:
    build = getattr(linear, part)
    return lambda rank: rest(build(rank, "x", ROWS, INPUTS, OUTPUTS) or iter(()))


def _attention(part: Callable[..., object]) -> Build:
    return lambda rank: part(rank, SHAPE, SHAPE.attention(rank.machine))


def _ulysses(part: str) -> Build:
    return getattr(ContextParallel(PART, SIZE, 0, SIZE, True, True), part)  # type: ignore[no-any-return]


def _causal(place: Place) -> Place:
    return place._replace(schedule=place.schedule.for_causal_blocks(place.size))


CASES: dict[str, tuple[Build, Made]] = {
    "column": (
        _linear("column"),
        lambda at: [gather_gemm(at, ROWS, INPUTS, OUTPUTS, False, None, 0)],
    ),
    "row": (_linear("row"), lambda at: [gemm_scatter(at, ROWS, INPUTS, OUTPUTS)]),
    "column gradients": (
        _linear("column_gradients"),
        lambda at: [column_backward(at, ROWS, INPUTS, OUTPUTS, True, True, True)],
    ),
    "row gradients": (
        _linear("row_gradients"),
        lambda at: [gather_gemm(at, ROWS, OUTPUTS, INPUTS, False, "whole", INPUTS)],
    ),
    "attention": (
        _attention(llama._attention_scatter),
        lambda at: [produce_scatter(_causal(at), ROWS, 48)],
    ),
    "attention gradients": (
        _attention(llama._gather_attention),
        lambda at: [gather_use(_causal(at), ROWS, 48, True)],
    ),
    "ulysses": (
        _ulysses("forward"),
        lambda at: [
            exchange(at, ROWS, 144 // SIZE, "made", False, True, False),
            exchange(_causal(at), ROWS, 48 // SIZE, "made and kept", True, True, False),
        ],
    ),
    "ulysses gradients": (
        _ulysses("backward"),
        lambda at: [
            exchange(at, ROWS, 48 // SIZE, "made", True, False, True),
            exchange(at, ROWS, 144 // SIZE, "given", True, True, False),
        ],
    ),
}


@pytest.mark.parametrize("batched", [True, False], ids=["in batches", "one by one"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_timed_is_the_program(case: str, schedule: Schedule, batched: bool) -> None:
    build, made = CASES[case]
    for number in range(SIZE):
        machine = replace(ideal(), batched=batched)
        rank = Rank(machine, number, SIZE, SIZE, Variant("fused", "fused", schedule))
        build(rank)
        programs = made(Place(schedule, number, SIZE, batched))
        # Compiled once per arguments: the very program that runs.
        assert [ran.program for ran in rank.ran.values()] == programs
        launches = rank.finish()
        for ran, program in zip(rank.ran, programs, strict=True):
            compare(launches, ran, program)


def compare(launches: Sequence[Operation], name: str, program: Program) -> None:
    """Its work, and its transfers on their lanes, in its order; they start after the work."""
    works = [one.work for one in program.code if isinstance(one, Compute)]
    found: list[object] = []
    last: int | None = None
    for at, one in enumerate(launches):
        if not one.name.startswith(name):
            continue
        for message in one.sends:
            assert {last} <= {None, *one.after}
            found.append((*message[1:4], message.key[-2], one.engine))
        if one.engine == COMPUTE:
            last, work = at, one.name.rpartition(" ")[2]
            found += [work] if work in works else []
    made: list[object] = []
    for step in program.code:
        if isinstance(step, Compute):
            made.append(step.work)
        elif isinstance(step, Post):
            for transfer, span in (end[:2] for way, end in step.ends if way == "send"):
                size = span.rows * width(program, span) * ITEM_BYTES
                lane = f"lane {transfer.lane}"
                made.append((transfer.source, transfer.target, size, transfer.step, lane))
    assert found == made


def width(program: Program, span: Span) -> int:
    """Columns of a span that travels."""
    scratch = {one.name: one.columns for one in program.scratch}
    given = program.arguments
    made = given.get("outputs") if span.buffer == "out" else given.get("inputs")
    return scratch.get(span.buffer) or made or given["columns"]


@pytest.mark.parametrize("wgrad", ["whole", "blocks"])
def test_a_layer_gathers_its_inputs_ahead(wgrad: Wgrad) -> None:
    """After everything that the row-parallel layer posts, before its last weight gradient."""
    variant = Variant("x", "fused", Schedule(lanes=5, chunks=2), wgrad=wgrad)
    rank = Rank(ideal(), 1, SIZE, SIZE, variant)
    llama.backward(rank, SHAPE)
    names = [one.name for one in rank.finish()]
    for row, column in (("fc2", "fc1"), ("proj", "qkv")):
        posts, ahead = (
            [at for at, name in enumerate(names) if name.startswith(f"{layer} backward block")]
            for layer in (row, column)
        )
        last = max(at for at, name in enumerate(names) if name == f"{row} backward wgrad")
        assert len(ahead) == SIZE - 1
        assert max(posts) < min(ahead) <= max(ahead) < last
