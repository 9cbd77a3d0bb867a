"""Programs with a fault, in the place of those that were compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from commfuse_npu.plan.instructions import Add, Compute, Copy, Instruction, Post, Span, Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport

Fault = Callable[[pytest.MonkeyPatch], None]
Code = list[Instruction]


def change_programs(patch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    """Begin other programs than those that were compiled."""
    begin, changed = Transport.begin, dict[Program, Program]()

    def planted(self: Transport, program: Program, *args: Any, **keywords: Any) -> Running:
        if program not in changed:
            changed[program] = change(program)
        return begin(self, changed[program], *args, **keywords)

    patch.setattr(Transport, "begin", planted)


def of_program(rule: str, change: Callable[[Code, Program], Code]) -> Fault:
    """A fault in the programs of one rule, on all ranks."""

    def changed(program: Program) -> Program:
        if program.rule[0] != rule:
            return program
        return replace(program, code=tuple(change(list(program.code), program)))

    return lambda patch: change_programs(patch, changed)


def one_slot_for_all(what: str) -> Fault:
    """Scratch of one kind shares its memory, without a wait before it is used again."""

    def changed(program: Program) -> Program:
        scratch = tuple(
            one._replace(slot=what) if one.name.startswith(what) else one for one in program.scratch
        )
        return replace(program, scratch=scratch)

    return lambda patch: change_programs(patch, changed)


def places(code: Code, kind: type[Instruction]) -> list[int]:
    return [at for at, one in enumerate(code) if isinstance(one, kind)]


def own_block_moved(code: Code, program: Program) -> Code:
    """The first piece of work comes last."""
    first = code.pop(places(code, Compute)[0])
    return [*code, first]


def own_block_first(code: Code, program: Program) -> Code:
    last = code.pop(places(code, Compute)[-1])
    return [last, *code]


def last_transfer_dropped(code: Code, program: Program) -> Code:
    last = max(program.transfers)
    kept = []
    for one in code:
        ends = [end for end in one if end is not None] if isinstance(one, Post) else []
        if any(end.transfer.step == last for end in ends):
            continue
        if isinstance(one, Wait):
            one = one._replace(
                receives=tuple(step for step in one.receives if step != last),
                sends=tuple(step for step in one.sends if step != last),
            )
        kept.append(one)
    return kept


def changed(code: Code, kind: type[Instruction], how: Callable[[Any], Instruction]) -> Code:
    at = places(code, kind)[-1]
    code[at] = how(code[at])
    return code


def added_twice(code: Code, program: Program) -> Code:
    return changed(code, Add, lambda one: one._replace(terms=(*one.terms, one.terms[-1])))


def own_partial_first(code: Code, program: Program) -> Code:
    """The same sum but for rounding."""
    return changed(code, Add, lambda one: one._replace(terms=one.terms[::-1]))


def another_block_sent(code: Code, program: Program) -> Code:
    """The rows of the own block instead of the peer's."""
    at = next(at for at in places(code, Post) if code[at].send is not None)
    post = code[at]
    rows = post.send.span.stop - post.send.span.start
    mine = Span(post.send.span.buffer, program.rank * rows, (program.rank + 1) * rows)
    code[at] = post._replace(send=post.send._replace(span=mine))
    return code


def copied_elsewhere(code: Code, program: Program) -> Code:
    def first_rows(one: Copy) -> Copy:
        length = one.out.stop - one.out.start
        return one._replace(out=one.out._replace(start=0, stop=length))

    return changed(code, Copy, first_rows)


def other_columns(code: Code, program: Program) -> Code:
    """A group of columns is made of the weight's first columns."""

    def first_columns(one: Compute) -> Compute:
        a, weight = one.ins
        first, last = weight.columns
        return one._replace(ins=(a, weight._replace(columns=(0, last - first))))

    return changed(code, Compute, first_columns)


def used_twice(code: Code, program: Program) -> Code:
    return [*code, code[places(code, Compute)[0]]]


def one_end_of_a_bucket_mixed_up(code: Code, program: Program) -> Code:
    """The two ends of a bucket's gather do not mean the same chunk."""
    receives = [at for at in places(code, Post) if code[at].receive is not None]
    spans = [code[at].receive.span for at in receives]
    peers = program.size - 1
    for at, span in zip(receives, spans[peers:] + spans[:peers], strict=True):
        code[at] = code[at]._replace(receive=code[at].receive._replace(span=span))
    return code
