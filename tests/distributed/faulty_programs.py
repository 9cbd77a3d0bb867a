"""Programs with a fault, in the place of those that were compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from commfuse_npu.plan.instructions import Add, Instruction, Post
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


def own_partial_first(code: Code, program: Program) -> Code:
    """In the last sum: the same but for rounding."""
    last = max(at for at, one in enumerate(code) if isinstance(one, Add))
    code[last] = code[last]._replace(terms=code[last].terms[::-1])
    return code


def chunks_mixed_up(code: Code, program: Program) -> Code:
    """The two ends of a bucket's gather do not mean the same chunk."""
    receives = [k for k, one in enumerate(code) if isinstance(one, Post) and one.receive]
    spans = [code[at].receive.span for at in receives]
    peers = program.size - 1
    for at, span in zip(receives, spans[peers:] + spans[:peers], strict=True):
        code[at] = code[at]._replace(receive=code[at].receive._replace(span=span))
    return code
