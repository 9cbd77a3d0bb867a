"""Forward-backward overlap: a forward and a backward alternate on one stream, as launches.

Each side is launched in Megatron's order (:mod:`.llama`), and hands over at collectives; a ring's
passes of keys and values are none.  The operations of both sides are then merged in the order in
which the sides alternate (:mod:`commfuse_npu.plan.turn_order`).  That order is chosen from their
own work and transfers, as a launch chooses it from its first step.  All transfers are collectives
of one communicator, in launch order.  A hand-over costs a host launch.
"""

from collections.abc import Sequence
from itertools import groupby, islice

from commfuse_npu.plan.turn_order import HandOverPoint, best_order, turns
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.launches import COMPUTE, Operation
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import RING, Rank

_Piece = tuple[range, HandOverPoint]
"""Operations up to a possible hand-over, and that point."""


def pair(rank: Rank, shape: LayerShape, layers: int, recomputes: bool = False) -> None:
    """Add the forward of ``layers`` layers, and the backward of as many of another micro-batch.

    Args:
        recomputes: whether the backward first runs each layer's forward (full recomputation).
    """
    names = "forward of a pair: ", "backward of a pair: "
    like = rank.links, rank.rank, rank.variant
    forward, backward = (Rank(*like, name) for name in names)
    for _ in range(layers):
        llama.forward(forward, shape)
        if recomputes:
            llama.forward(backward, shape)
        llama.backward(backward, shape)
    operations = forward.finish(), backward.finish()
    ahead, behind = pieces = [_pieces(of_side, rank) for of_side in operations]
    order = best_order(([point for _, point in ahead], [point for _, point in behind]))
    placed: tuple[dict[int, int], dict[int, int]] = {}, {}
    for side, number in turns(order):
        for index in pieces[side][number][0]:
            launch = operations[side][index]
            placed[side][index] = rank.add(launch, (placed[side][need] for need in launch.after))
        if order[side][number]:
            rank.compute("hand over", 0.0)


def _pieces(operations: Sequence[Operation], rank: Rank) -> list[_Piece]:
    """Split at transfers: after one starts, and before work that waits for an earlier one."""
    pieces: list[_Piece] = []
    collective = rank.machine.collective
    start, work, under_way = 0, 0.0, list[range]()

    def cut(stop: int, transfer: float, waits: int | None, by_default: bool) -> None:
        nonlocal start, work
        pieces.append((range(start, stop), HandOverPoint(work, transfer, waits, by_default)))
        start, work = stop, 0.0

    for transfer, run in groupby(enumerate(operations), _transfer):
        numbers = [number for number, _ in run]
        begun = range(numbers[0], numbers[-1] + 1)
        if not isinstance(transfer, str):
            launch = operations[begun.start]
            for waited in [other for other in under_way if set(other) & set(launch.after)]:
                scatters = "scatter" in operations[waited[0]].name
                cut(begun.start, 0.0, under_way.index(waited), scatters)
                under_way.remove(waited)
            work += launch.seconds
            continue
        sends = [message for at in begun for message in operations[at].sends]
        follows = (launch for launch in operations[begun.stop :] if launch.engine == COMPUTE)
        blocking = bool(set(begun) & {at for launch in islice(follows, 1) for at in launch.after})
        seconds = max(
            message.size
            if message.source == message.target
            else message.delay + collective(message.size, rank.size)
            for message in sends
        )
        cut(begun.stop, seconds, len(under_way) if blocking else None, blocking)
        if not blocking:
            under_way.append(begun)
    cut(len(operations), 0.0, None, False)
    return pieces


def _transfer(numbered: tuple[int, Operation]) -> str | int:
    """The name of a collective, which gloo splits into a receive and a send; for anything else its
    index, so that each piece of work is its own group."""
    number, launch = numbered
    return number if launch.engine == COMPUTE or launch.name == RING else launch.name
