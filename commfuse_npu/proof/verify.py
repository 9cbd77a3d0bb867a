"""Proves a set of programs, one per rank, or refutes it with counter-examples in words.

A program that runs on gloo, where transfers match by tag in any order, may hang on HCCL, so a run
proves little.  The proof is about the :class:`Program` objects that the executor runs:

1. *pairing*: each send has a receive, and the reverse, with equal step, lane, size and piece;
2. *one global order*: every rank posts its steps in rising order, each as one batch, and waits for
   a step only after it posted it, hence all lower ones too;
3. *memory*: no instruction accesses rows of a transfer in flight, and accesses of two streams of a
   device to the same rows are ordered (:mod:`commfuse_npu.proof.hazards`);
4. *data*: the results equal those of the rule's lines, row by row, with every partial sum added
   once and in the order of the peers, and the own block first or last
   (:mod:`commfuse_npu.proof.data_flow`, :mod:`commfuse_npu.proof.outcomes`).

**No deadlock.**  1 and 2 suffice for rendezvous transfers on any number of in-order lanes.  Take
the lowest step that is not finished.  Ranks wait only for lower steps, which are finished, or for
this one after posting their ends of it.  So both ends of all its transfers get posted, each at the
head of its lane, because all that precedes it on the lane has a lower step.  So it finishes.  The
same holds for a link that is opened at the first use of a lane between two ranks, since both open
it in the same step.  The tests simulate every case by the rules of HCCL, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commfuse_npu.plan.instructions import Collective, Post
from commfuse_npu.plan.program import Program
from commfuse_npu.proof.data_flow import Contents, execute
from commfuse_npu.proof.hazards import hazards
from commfuse_npu.proof.memory import Memory, describe
from commfuse_npu.proof.outcomes import outcome_faults, outcome_of

__all__ = ["counter_examples"]

_MOST_FAULTS = 8


def counter_examples(programs: Sequence[Program]) -> list[str]:
    """The first counter-examples that refute ``programs``, in words; empty if they are proved.

    Args:
        programs: of ranks 0..n-1 in order, all compiled by one rule with the same arguments.
    """
    contents = Contents()
    outcomes = [outcome_of(program, contents) for program in programs]
    memories = [
        Memory(program, outcome.shapes) for program, outcome in zip(programs, outcomes, strict=True)
    ]
    faults = [fault for program in programs for fault in _ends(program)]
    if faults:
        return faults[:_MOST_FAULTS]
    for program, memory in zip(programs, memories, strict=True):
        faults += hazards(program, memory)
    faults = faults or [*_pairing(programs, memories)]
    faults += [fault for program in programs for fault in _order(program)]
    if faults:
        return faults[:_MOST_FAULTS]
    executions = execute(programs, memories, contents)
    faults = [fault for execution in executions for fault in execution.faults]
    # Ranks that wait for data of a faulty one stop, too.
    if not faults:
        for of_rank in zip(programs, outcomes, executions, strict=True):
            faults += outcome_faults(*of_rank, contents)
    return faults[:_MOST_FAULTS]


def _ends(program: Program) -> Iterator[str]:
    """Check that every transfer is between this rank and another of the group, on a valid lane."""
    lanes = program.spec.schedule.lanes_for(program.size)
    for at, post in enumerate(program.code):
        if not isinstance(post, Post | Collective):
            continue
        for way, (transfer, _) in post.ends:
            own = transfer.source
            peer = transfer.target
            if way == "receive":
                own, peer = peer, own
            alone = own == peer and isinstance(post, Post)
            if own != program.rank or alone or not 0 <= peer < program.size:
                others = f"another one of {program.size}"
                yield f"{describe(program, at)}: {transfer} is not between this rank and {others}"
            elif not 0 <= transfer.lane < lanes:
                yield f"{describe(program, at)}: there is no lane {transfer.lane} of {lanes}"
        if isinstance(post, Collective):
            yield from (f"{describe(program, at)}: {fault}" for fault in _unlike(program, post))
        elif len({end.transfer[:2] for _, end in post.ends}) > 1:
            yield f"{describe(program, at)}: the ends of a batch are of one step and lane"


def _unlike(program: Program, collective: Collective) -> Iterator[str]:
    """Check that an instruction is what the torch.distributed collective of this kind does."""
    everyone = list(range(program.size))
    peers = [rank for rank in everyone if rank != program.rank]
    targets = [transfer.target for transfer in collective.sends]
    sources = [transfer.source for transfer in collective.receives]
    whole = [everyone] if collective.kind == "all_gather" else [everyone, peers]
    if targets != sources or targets not in whole:
        yield f"a collective is of all ranks in their order, not to {targets} and from {sources}"
    elif len({transfer.lane for transfer in (*collective.sends, *collective.receives)}) > 1:
        yield "a collective is on one lane"
    elif collective.out.rows % len(sources) or (
        collective.kind == "all_to_all" and collective.source.rows % len(targets)
    ):
        yield f"its rows are not {len(targets)} equal blocks"


def _pairing(programs: Sequence[Program], memories: Sequence[Memory]) -> Iterator[str]:
    """Check that each send has a receive of the same rows, and the reverse."""
    ends: dict[str, dict[tuple[int, int, int], str]] = {"send": {}, "receive": {}}
    for program, memory in zip(programs, memories, strict=True):
        for post in program.posts:
            for way, (transfer, span) in post.ends:
                key = transfer.step, transfer.source, transfer.target
                ends[way][key] = f"{span.rows} x {memory.width(span)} of {transfer}"
    for key in sorted(ends["send"].keys() | ends["receive"].keys()):
        sent, expected = (ends[way].get(key, "nothing") for way in ("send", "receive"))
        if sent != expected:
            yield f"rank {key[1]} sends {sent}, rank {key[2]} expects {expected}"


def _order(program: Program) -> Iterator[str]:
    """Check that steps rise."""
    last = -1
    for at, post in enumerate(program.code):
        if isinstance(post, Post | Collective):
            steps = [end.transfer.step for _, end in post.ends]
            if min(steps) <= last:
                text = f"it posts step {min(steps)} after step {last}; there is no common order"
                yield f"{describe(program, at)}: {text}"
            last = max(last, *steps)
