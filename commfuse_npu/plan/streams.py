"""Where one stream of a device waits for the other.

A stream comes to what the other one has used only after that is done.  It knows so by an event that
it held for, or by a transfer that it waited for: a transfer begins when the stream that posted it
has come to it.  Of what comes before the program, or before its mark, the second stream knows
nothing; and everything on it is done when the program is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from commfuse_npu.plan.program import (
    Hold,
    Instruction,
    Mark,
    Post,
    Record,
    Span,
    Wait,
    accesses,
    is_aside,
)

__all__ = ["with_events"]


def with_events(
    code: Sequence[Instruction], clash: Callable[[Span, Span], bool]
) -> list[Instruction]:
    """The code with a :class:`Record` and a :class:`Hold` wherever they are needed.

    Args:
        clash: whether two spans are the same memory in part.
    """
    if not any(map(is_aside, code)):
        return list(code)
    touched = _touched(code)
    # By stream, in order; what is posted is waited for by one of the two.
    given: dict[bool, list[int]] = {False: [], True: []}
    for at, one in enumerate(code):
        if not isinstance(one, Post):
            given[is_aside(one)].append(at)
    posted: dict[int, int] = {}
    # By the place in front of which they are.
    records: dict[int, int] = {}
    holds: dict[int, int] = {}
    # As far as here each stream knows the other one's instructions to be done.
    known = {False: 0, True: -1}
    for at, one in enumerate(code):
        aside = is_aside(one)
        if isinstance(one, Wait):
            if aside:
                through = [posted[step] + 1 for _, step in one.ends]
                known[True] = max(known[True], *through)
            continue
        other = given[not aside]
        unknown = other[bisect_left(other, known[aside]) : bisect_left(other, at)]
        found = [
            k for k in unknown if isinstance(code[k], Mark) or _meet(touched[k], touched[at], clash)
        ]
        if found or known[aside] < 0:
            known[aside] = max(found, default=-1) + 1
            holds[at] = records.setdefault(known[aside], len(records))
        if isinstance(one, Post):
            posted[one.transfer.step] = at
    left = [at for at in range(known[False], len(code)) if is_aside(code[at])]
    if left:
        holds[len(code)] = records.setdefault(left[-1] + 1, len(records))
    return _put_in(code, records, holds)


def _put_in(
    code: Sequence[Instruction], records: dict[int, int], holds: dict[int, int]
) -> list[Instruction]:
    found: list[Instruction] = []
    for at in range(len(code) + 1):
        if at in records:
            # Of the stream of what it comes after.
            found.append(Record(records[at], at > 0 and is_aside(code[at - 1])))
        if at in holds:
            found.append(Hold(holds[at], at < len(code) and is_aside(code[at])))
        found += code[at : at + 1]
    return found


_Touched = tuple[Sequence[Span], Sequence[Span]]


def _touched(code: Sequence[Instruction]) -> list[_Touched]:
    """What instructions read and write; what arrives is written by the stream that waits for it."""
    spans: dict[tuple[str, int], Span] = {}
    found: list[_Touched] = []
    for one in code:
        if isinstance(one, Post):
            spans |= {(way, end.transfer.step): end.span for way, end in one.ends}
        if isinstance(one, Wait):
            left = [spans["send", step] for step in one.sends]
            found.append((left, [spans["receive", step] for step in one.receives]))
        else:
            found.append(accesses(one))
    return found


def _meet(one: _Touched, other: _Touched, clash: Callable[[Span, Span], bool]) -> bool:
    """Whether what one of two instructions writes is touched by the other."""
    (reads, writes), (other_reads, other_writes) = one, other
    return any(
        clash(a, b)
        for mine, theirs in ((writes, (*other_reads, *other_writes)), (reads, other_writes))
        for a in mine
        for b in theirs
    )
