"""Simulates sets of programs by the rules of HCCL and gloo: the oracle of the proof's theorem.

Programs that pass the checks of pairing and order finish in this simulation, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commfuse_npu.plan.instructions import Collective, Post, Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.proof import rendezvous as simulation


def rendezvous(operations: Sequence[Sequence[Program]]) -> str | None:
    """Simulate programs; return ``None`` if they finish, else the cycle of ranks that wait.

    Batched programs follow the rules of HCCL, with links that open at their first use; others those
    of gloo, where each message has its own lane (:mod:`commfuse_npu.proof.rendezvous`).

    Args:
        operations: sets of programs on the same lanes.  All run to their ``ahead_end``, one after
            the other, and then to their ends in the same order.
    """
    group = simulation.Group("programs", tuple(range(operations[0][0].size)))
    scripts = []
    for rank in group.ranks:
        numbered = [(number, programs[rank]) for number, programs in enumerate(operations)]
        parts = [(number, program, slice(None, program.ahead_end)) for number, program in numbered]
        parts += [(number, program, slice(program.ahead_end, None)) for number, program in numbered]
        actions = [
            act for number, program, part in parts for act in _actions(number, program, part, group)
        ]
        scripts.append(simulation.Script(rank, actions))
    batched = operations[0][0].batched
    stuck = simulation.Rendezvous(scripts, opened=set() if batched else None).simulate()
    return None if stuck is None else stuck.text


def _actions(
    number: int, program: Program, part: slice, group: simulation.Group
) -> Iterator[simulation.Action]:
    """The posts and waits of a part of a program's code, for the simulation."""
    posted: dict[tuple[str, int], tuple[simulation.End, ...]] = {}
    for post in program.posts:
        away = [end.transfer for _, end in post.ends if not end.transfer.stays]
        batch = tuple(simulation.End(number, transfer) for transfer in away)
        posted |= {(way, end.transfer.step): batch for way, end in post.ends}
    for instruction in program.code[part]:
        if isinstance(instruction, Post | Collective):
            transfer = instruction.transfer
            tagged = isinstance(instruction, Post) and not program.batched
            # On gloo, where messages match by tag, each has its own lane.
            lane = (number, transfer) if tagged else transfer.lane
            yield simulation.Post(group, lane, posted[instruction.ends[0][0], transfer.step])
        elif isinstance(instruction, Wait):
            # A wait for one end of a batch waits for both.
            yield simulation.Wait(
                tuple(end for wait in instruction.ends for end in posted.get(wait, ()))
            )
