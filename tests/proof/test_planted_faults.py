"""Correct programs with a planted fault are refuted, with a message that names the fault."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import (
    Add,
    Collective,
    Compute,
    Instruction,
    Post,
    Wait,
    WaitEvent,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import (
    BucketScatter,
    ColumnBackward,
    ExchangeBlocks,
    GatherGemm,
    GatherUse,
    GemmScatter,
    ProduceScatter,
    Rule,
)
from commfuse_npu.proof.cases import Case
from commfuse_npu.proof.verify import counter_examples

Group = list[Program]
Code = list[Any]
Fault = Callable[[Code], object]
"""Changes the code of a rank in place."""


def group(rule: Rule, *, chunks: int = 1) -> Group:
    return Case(rule, Schedule(lanes=2, chunks=chunks), 3).programs()


def gather() -> Group:
    return group(GatherGemm(2, 2, 3))


def together(rule: Rule) -> Group:
    return Case(rule, Schedule("collective", chunks=2), 3).programs()


def scatter(chunks: int = 1) -> Group:
    return group(GemmScatter(2, 2, 4), chunks=chunks)


def changed(programs: Group, rank: int, fault: Fault) -> Group:
    """The programs with a fault in the code of one rank."""
    code = [*programs[rank].code]
    fault(code)
    return [*programs[:rank], replace(programs[rank], code=tuple(code)), *programs[rank + 1 :]]


def replaced(value: Any, part: tuple[Any, ...], new: tuple[Any, ...]) -> Any:
    """``value`` with ``new`` wherever nested tuples have ``part``, by identity."""
    if value is part or not isinstance(value, tuple):
        return new if value is part else value
    items = [replaced(item, part, new) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def altered(value: Any, **fields: Any) -> Any:
    """A copy of a named tuple with other values of these fields."""
    return value._replace(**fields)


def at(code: Code, kind: type[Instruction], number: int = 0) -> int:
    """The position of the instruction of this number among those of its kind."""
    return [k for k, instruction in enumerate(code) if isinstance(instruction, kind)][number]


def move(kind: type[Instruction], number: int, to: type[Instruction], to_number: int) -> Fault:
    """Move an instruction to the place of another one."""

    def moved(code: Code) -> None:
        place = at(code, to, to_number)
        code.insert(place, code.pop(at(code, kind, number)))

    return moved


def drop(kind: type[Instruction], number: int = 0) -> Fault:
    return lambda code: code.pop(at(code, kind, number))


def change(kind: type[Instruction], number: int = 0, **fields: Any) -> Fault:
    def to_other_values(code: Code) -> None:
        place = at(code, kind, number)
        values = {name: new(getattr(code[place], name)) for name, new in fields.items()}
        code[place] = altered(code[place], **values)

    return to_other_values


def posts(**ends: Any) -> Fault:
    """Change fields of the transfer or of the span in the ends of the first post."""

    def to_other_ends(code: Code) -> None:
        place = at(code, Post)
        for way, changes in ends.items():
            transfer, span = getattr(code[place], way)
            part = span if all(hasattr(span, name) for name in changes) else transfer
            code[place] = replaced(code[place], part, altered(part, **changes))

    return to_other_ends


def added_too_late(code: Code) -> None:
    """The first sum comes after the GEMM that uses the memory of its own block again."""
    gemm, add = at(code, Compute, 2) + 1, at(code, Add)
    code[gemm:gemm] = [altered(step, on_side_stream=False) for step in code[add - 1 : add + 1]]
    del code[add - 1 : add + 1]


USED = GatherUse(2, 2)

FAULTS: dict[str, tuple[Group, Fault, str]] = {
    # Pairing and order.
    "swapped posts of two lanes, which only hangs while links are closed": (
        gather(), move(Post, 1, Post, 0), "it posts step 0 after step 1; there is no common order",
    ),
    "a missing post": (gather(), drop(Post), "it has posted no step 0"),
    "a missing wait": (gather(), drop(Wait), "rank 0 never waits for block 0 from rank 0 to rank"),
    "a lane that does not exist": (
        gather(), posts(send={"lane": 2}, receive={"lane": 2}), "there is no lane 2 of 2",
    ),
    "two lanes in a batch": (gather(), posts(send={"lane": 1}), "a batch are of one step and lane"),
    "to itself": (gather(), posts(send={"target": 0}), "rank 0 to rank 0 .* is not between th"),
    # Memory.
    "sums in a message": (
        group(BucketScatter(2, 1, 1)), posts(send={"buffer": "total", "start": 0, "stop": 2}),
        "has the dtype of sums",
    ),
    "memory used again while it is sent": (
        group(ExchangeBlocks(3, 2, "made", False, True), chunks=3), drop(Wait),
        "writes made 2 where block 0 for 1 chunk 0 .* leaves, and has not waited for it",
    ),
    "memory used again, and only the side stream waits": (
        group(ProduceScatter(3, 2), chunks=3), drop(Wait, 1),
        r"rows 5:6\)\): only the other stream has waited for the send of step 0",
    ),
    "a piece read before it arrives": (
        group(ProduceScatter(3, 2), chunks=3), drop(Wait, 2),
        "reads partials 1 where partial for 0 chunk 1 .* arrives, and has not waited for it",
    ),
    "memory used again while the other stream adds": (
        scatter(chunks=4), move(WaitEvent, 0, Compute, 2), "it races with rank 0, instruct",
    ),
    "the side stream before the rest of the device": (
        group(ColumnBackward(2, 2, 3, True, True)), drop(WaitEvent),
        "the side stream does not wait for what came before",
    ),
    "a read of what the other stream writes": (
        group(GatherGemm(4, 2, 3, 2), chunks=2), drop(WaitEvent, -1),
        r"wgrad.* it races with rank 0, instruction 18 \(side stream: whole",
    ),
    "an end before the side stream's": (
        scatter(chunks=4), drop(WaitEvent, -1), "rank 0 ends without waiting for the side stream",
    ),
    "memory used again before it is added": (
        scatter(chunks=4), added_too_late, "it reads rows of product 0 that hold nothing",
    ),
    "an unknown buffer": (gather(), posts(send={"buffer": "y"}), "y is neither a buffer of"),
    "a sum over one of its parts": (
        group(BucketScatter(4, 1, 1)),
        change(Add, 1, out=lambda span: altered(span, stop=3)),
        "it writes over what it reads",
    ),
    # Data.
    "added twice": (
        scatter(), change(Add, terms=lambda terms: (*terms, terms[-1])),
        r"rank 0: out\[0, 0:4\] is a sum with gemm\(a\[0, 0:2\] of rank 0, weight\[0:2, 0:4\] of "
        r"rank 0\) of rank 0 2 times, not 1",
    ),
    "another order of additions": (
        scatter(), change(Add, terms=lambda terms: terms[::-1]),
        r"other order: its part 0 is gemm\(a\[0, 0:2\] of rank 0.* be gemm\(a\[0, 0:2\] of rank 2",
    ),
    "an input that is changed": (
        scatter(), change(Add, out=lambda span: altered(span, buffer="weight")),
        "it changes weight",
    ),
    "columns that do not fit": (
        scatter(chunks=2), change(Compute, ins=lambda ins: (ins[0], altered(ins[1], columns=None))),
        "the columns of its matrices do not fit$",  # and nothing about the ranks that wait for it
    ),
    "a run of other rows": (
        group(USED), change(Compute, 1, run=lambda run: slice(2, 4)),
        r"call 1 of use is for rows 2:4 with shard\[0:2, .* has to be for rows 4:6 with shard",
    ),
    # Collectives.
    "a collective in another order": (
        together(GatherGemm(2, 2, 3)),
        change(Collective, sends=lambda all_of: all_of[::-1]),
        r"of all ranks in their order, not to \[2, 1, 0\] and from \[0, 1, 2\]",
    ),
    "blocks of different lengths": (
        together(GemmScatter(2, 2, 4)),
        change(Collective, source=lambda span: altered(span, stop=span.stop - 1)),
        "its rows are not 3 equal blocks",
    ),
    # Position of the own block.
    "the own block not last": (
        scatter(chunks=2), move(Compute, -1, Compute, -2), "its last gemm is not that of",
    ),
    "a wait before the own block": (
        gather(), move(Wait, 0, Compute, 0),
        "it waits before the gemm of its own block",
    ),
    "the own block not first": (
        gather(), move(Compute, 0, Compute, 1),
        "its first gemm is not that of its own block",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    programs, fault, words = FAULTS[name]
    assert not counter_examples(programs)
    found = counter_examples(changed(programs, 0, fault))
    assert re.search(words, "\n".join(found), re.DOTALL), found
