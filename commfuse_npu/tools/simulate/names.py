"""What is seen of an operation in a trace or a picture: ``fc1 dgrad, chunk 2 of rank 3``.

The simulator's own names say which operation something is of; which block of which rank it works
on is read from its program: what arrives there, and what is sent off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from commfuse_npu.plan.program import Compute, Copy, End, Post, Program, Span, accesses, overlap
from commfuse_npu.tools.simulate.launches import Operation

__all__ = ["message", "name", "work"]

_PIECE = re.compile(r"(block|partial for) (\d+)(?: chunk (\d+))?$")
_LINEAR = re.compile(r"(qkv|proj|fc1|fc2|output)( backward)?(?: (.+))?$")
_FORWARD = {
    "": "GEMM",
    "gemm": "GEMM",
    "gather": "all-gather",
    "scatter": "reduce-scatter",
}
_BACKWARD = {
    "": "dgrad",
    "gemm": "dgrad",
    "wgrad": "wgrad",
    "gather": "all-gather of the gradient",
    "re-gather": "all-gather of the input, again",
    "scatter": "reduce-scatter of dgrad",
}
_OTHERS = {" gather": " all-gather", " scatter": " reduce-scatter", " make": "", " use": ""}


def name(operation: Operation) -> str:
    """In the field's words, with its chunk and its ranks where it has any."""
    if operation.origin is None:
        return _said(operation.name)
    program, place = operation.origin
    one = program.code[place]
    if isinstance(one, Post):
        end = one.send or one.receive
        assert end is not None
        piece = end.transfer.piece
        return message(operation.name.removesuffix(f" {piece}"), program, piece)
    return work(operation.name, program, place)


def message(operation: str, program: Program, piece: str) -> str:
    """What carries a piece in the program of an operation, ``fc1 backward``."""
    again = program.rule[0] == "column_backward"
    return f"{_said(f'{operation} {_collective(piece, again)}')}, {_pieces([piece])}"


def work(text: str, program: Program, place: int) -> str:
    """Work, a sum or a copy in this place of a program: ``fc1 backward wgrad``."""
    found = _of(program, place)
    return f"{_said(text)}, {found}" if found else _said(text)


def _said(text: str) -> str:
    found = _LINEAR.match(text)
    known = _BACKWARD if found and found[2] else _FORWARD
    if found is not None and (found[3] or "") in known:
        return f"{found[1]} {known[found[3] or '']}"
    for own, theirs in _OTHERS.items():
        if text.endswith(own):
            return text.removesuffix(own) + theirs
    return text


def _collective(piece: str, again: bool) -> str:
    found = _PIECE.match(piece)
    if found is None:
        return "transfer"
    return ("re-gather" if again else "gather") if found[1] == "block" else "scatter"


@lru_cache(maxsize=4096)
def _of(program: Program, place: int) -> str:
    """Chunk and ranks of work, a sum or a copy; empty if it is about all of them."""
    one = program.code[place]
    reads, writes = accesses(one)
    copied = {other.out.buffer for other in program.code if isinstance(other, Copy)}
    found: list[str] = []
    for span in reads:
        ends = [end for end in _ends(program, "receive") if _meet(end, span)]
        partly = 0 < _rows(ends) < span.rows
        if isinstance(one, Compute) and (partly or (not ends and span.buffer in copied)):
            return ""  # the own block is in it, too: it is all of them
        found += [end.transfer.piece for end in ends]
    if isinstance(one, Compute) and not found:
        found = [
            end.transfer.piece
            for end in _ends(program, "send")
            if any(_meet(end, span) for span in writes)
        ]
    pieces = [piece for piece in dict.fromkeys(found) if _PIECE.match(piece)]
    if pieces:
        return _pieces(pieces)
    return "own block" if isinstance(one, Compute) and program.transfers else ""


def _rows(ends: Iterable[End]) -> int:
    return sum({end.span: end.span.rows for end in ends}.values())


def _ends(program: Program, side: str) -> Iterator[End]:
    for post in program.posts:
        end: End | None = getattr(post, side)
        if end is not None:
            yield end


def _meet(end: End, span: Span) -> bool:
    return end.span.buffer == span.buffer and overlap(end.span, span)


def _pieces(pieces: Iterable[str]) -> str:
    """``chunk 2 of rank 3``, ``chunk 0 for ranks 0-3, 5-7``, ``the block of rank 1``."""
    ranks: set[int] = set()
    chunks: set[int] = set()
    word = "of"
    for piece in pieces:
        found = _PIECE.match(piece)
        if found is None:
            return piece
        word = "of" if found[1] == "block" else "for"
        ranks.add(int(found[2]))
        if found[3] is not None:
            chunks.add(int(found[3]))
    plural = "s" if len(ranks) > 1 else ""
    what = f"chunk{'s' if len(chunks) > 1 else ''} {_runs(chunks)}" if chunks else f"block{plural}"
    return f"{what} {word} rank{plural} {_runs(ranks)}"


def _runs(numbers: Iterable[int]) -> str:
    """``0-3, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
