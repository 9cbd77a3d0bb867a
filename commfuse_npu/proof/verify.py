"""Proves a set of plans, one per rank, or refutes it with a counter-example in words.

What gloo executes without complaint may hang on HCCL (its transfers match by tag, in any order), so
running a plan proves little about it.  This file checks the plan itself:

1. *pairing*: each send has exactly one receive, on the same lane, and the other way round;
2. *one global order*: both ends give a transfer the same step, and every rank posts its steps in
   rising order;
3. *data*: what is sent is there when it is sent; every block is delivered exactly once, every
   partial sum is added exactly once;
4. *work*: every piece is computed once, the own block first (gather) or last (scatter); a step
   uses what the step before brought, or makes what the next sends, which is what
   :mod:`commfuse_npu.runtime.pipeline` takes for granted;
5. *sums*: partials are added in the order ``r-1, ..., r+1`` (not for ``two_level``, whose order is
   its own, and which is checked for nothing but being complete).

**No deadlock.**  1 and 2 are enough, for rendezvous transfers on in-order lanes, any number of
them: take the lowest step that is not finished.  Every rank posts in rising order and waits, before
it posts, only for lower steps (a window's oldest transfer, a block to pass on, the creation of a
communicator that all ranks reach in the same order), and these are finished; so both ends of all
its transfers are posted, each at the head of its lane, because everything before it on that lane
has a lower step.  So it finishes.  :func:`rendezvous` plays the same rules through, warm or cold,
batched or one operation at a time, and finds the cycle when 2 does not hold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from commfuse_npu.plan import Piece, Plan, PlanError, Transfer
from commfuse_npu.proof.rendezvous import Action, End, Group, Post, Programme, Rendezvous, Wait

__all__ = ["counter_examples", "lane_counter_examples", "rendezvous", "verify"]


def verify(plans: Sequence[Plan]) -> None:
    """Prove ``plans``, the plans of all ranks of one group, by rank.

    Raises:
        PlanError: they are refuted; the message holds the counter-examples.
    """
    found = counter_examples(plans)
    if found:
        raise PlanError("the plans do not hold:\n" + "\n".join(f"- {line}" for line in found))


def counter_examples(plans: Sequence[Plan], limit: int = 8) -> list[str]:
    """Why ``plans`` do not hold, in words; empty if they are proved.

    Args:
        plans: the plans of ranks 0..n-1, in this order.
        limit: at most so many are returned.
    """
    found = list(_set(plans)) or list(_ends(plans))
    if found:
        return found[:limit]
    for check in (_shape, _pairing, _order, _data, _work, _sums):
        found += check(plans)
    if found:
        for cold in (False, True):
            hang = rendezvous([plans], cold=cold)
            if hang:
                found.insert(0, hang)
                break
    return found[:limit]


def lane_counter_examples(plans: Sequence[Plan], proved: Sequence[Plan]) -> list[str]:
    """Why ``plans`` do not hold, given that ``proved`` do and should differ in their lanes only.

    Lanes enter the proof in one place: both ends of a transfer have to use the same one.  So plans
    that were proved for one number of lanes are proved for another with a fraction of the work.
    """
    found: list[str] = []
    lanes: dict[tuple[int, int], int] = {}
    for plan, other in zip(plans, proved, strict=True):
        if len(plan.steps) != len(other.steps):
            found.append(f"rank {plan.rank} has {len(plan.steps)} steps, not {len(other.steps)}")
        for step, same in zip(plan.steps, other.steps, strict=False):
            changed = step.compute != same.compute
            for transfer, before in ((step.send, same.send), (step.receive, same.receive)):
                if transfer is None or before is None:
                    changed |= transfer is not before
                    continue
                changed |= (transfer[0], *transfer[2:]) != (before[0], *before[2:])
                lane = lanes.setdefault((transfer.step, transfer.source), transfer.lane)
                if lane != transfer.lane or not 0 <= lane < plan.lanes:
                    found.append(f"{transfer}: its other end uses lane {lane} of {plan.lanes}")
            if changed:
                found.append(f"rank {plan.rank} differs in more than lanes in step {step.index}")
    return found


def _set(plans: Sequence[Plan]) -> Iterator[str]:
    if not plans:
        yield "there are no plans; give one per rank"
        return
    first = plans[0]
    if len(plans) != first.size:
        yield f"{len(plans)} plans were given for a group of {first.size}"
    for place, plan in enumerate(plans):
        if plan.rank != place:
            yield f"the plan in place {place} is that of rank {plan.rank}"
        same = (plan.kind, plan.size, plan.schedule, plan.own)
        if same != (first.kind, first.size, first.schedule, first.own):
            yield (
                f"rank {plan.rank} plans a {plan.kind} ({plan.schedule}, own block {plan.own}) in "
                f"a group of {plan.size}, rank 0 a {first.kind} ({first.schedule}, own block "
                f"{first.own}) in a group of {first.size}"
            )


def _ends(plans: Sequence[Plan]) -> Iterator[str]:
    """Every transfer names this rank and another one of the group, and a lane that exists."""
    for plan in plans:
        for step in plan.steps:
            for transfer, end in ((step.send, "source"), (step.receive, "target")):
                if transfer is None:
                    continue
                other = transfer.target if end == "source" else transfer.source
                if getattr(transfer, end) != plan.rank:
                    yield f"rank {plan.rank} plans a transfer in which it has no part: {transfer}"
                elif other == plan.rank:
                    yield f"rank {plan.rank} transfers to itself: {transfer}"
                elif not 0 <= other < plan.size:
                    yield f"rank {plan.rank} transfers with rank {other} of {plan.size}: {transfer}"
                elif not 0 <= transfer.lane < plan.lanes:
                    yield f"lane {transfer.lane} is not one of {plan.lanes}: {transfer}"
                elif transfer.piece.chunk not in range(plan.chunks):
                    yield f"a block has {plan.chunks} chunks only: {transfer}"


_Key = tuple[int, int, int, Piece]


def _key(transfer: Transfer) -> _Key:
    return transfer.lane, transfer.source, transfer.target, transfer.piece


def _pairing(plans: Sequence[Plan]) -> Iterator[str]:
    sends = Counter(_key(s.send) for plan in plans for s in plan.steps if s.send)
    receives = Counter(_key(s.receive) for plan in plans for s in plan.steps if s.receive)
    for (lane, source, target, piece), count in (sends - receives).items():
        yield (
            f"rank {source} sends {piece} to rank {target} on lane {lane}"
            f"{_times(count)}, which rank {target} does not receive there"
        )
    for (lane, source, target, piece), count in (receives - sends).items():
        yield (
            f"rank {target} expects {piece} from rank {source} on lane {lane}"
            f"{_times(count)}, which rank {source} does not send there"
        )


def _times(count: int) -> str:
    return "" if count == 1 else f" {count} times more than is matched"


def _order(plans: Sequence[Plan]) -> Iterator[str]:
    sent: dict[_Key, list[int]] = defaultdict(list)
    received: dict[_Key, list[int]] = defaultdict(list)
    for plan in plans:
        last = -1
        for step in plan.steps:
            posted = [transfer for transfer in (step.send, step.receive) if transfer is not None]
            for transfer, steps in ((step.send, sent), (step.receive, received)):
                if transfer is not None:
                    steps[_key(transfer)].append(transfer.step)
            for transfer in posted:
                if transfer.step <= last:
                    yield (
                        f"rank {plan.rank} posts {transfer} after its step {last}: "
                        "there is no common order"
                    )
                if transfer.step != step.index:
                    yield f"rank {plan.rank} posts {transfer} in its step {step.index}"
            last = max([last, *(transfer.step for transfer in posted)])
    for key in sent.keys() & received.keys():
        if sorted(sent[key]) != sorted(received[key]):
            _, source, target, piece = key
            yield (
                f"the two ends of a transfer disagree on its step: rank {source} sends {piece} in "
                f"step {sent[key][0]}, rank {target} expects it in step {received[key][0]}"
            )


def _data(plans: Sequence[Plan]) -> Iterator[str]:
    """Follow the data through the steps: who holds which contributions of which piece, when."""
    first = plans[0]
    reducing = first.kind == "reduce_scatter"
    held: list[dict[Piece, Counter[int]]] = [defaultdict(Counter) for _ in plans]
    for plan in plans:
        if plan.own == "first":
            for step in plan.steps:
                if step.send and step.send.piece.source == plan.rank:
                    held[plan.rank][step.send.piece] = Counter([plan.rank])
    timeline = max((len(plan.steps) for plan in plans), default=0)
    for index in range(timeline):
        moved: list[tuple[Transfer, Counter[int]]] = []
        for plan in plans:
            if index >= len(plan.steps):
                continue
            step = plan.steps[index]
            if step.send is not None:
                content = held[plan.rank].get(step.send.piece)
                if not content:
                    yield f"rank {plan.rank} does not yet hold what it sends: {step.send}"
                else:
                    moved.append((step.send, Counter(content)))
                    if reducing:
                        held[plan.rank][step.send.piece].clear()
        for transfer, content in moved:
            held[transfer.target][transfer.piece] += content
        for plan in plans:
            if index < len(plan.steps) and plan.own == "last":
                made = plan.steps[index].compute
                if made is not None and made.chunk is not None:
                    held[plan.rank][made] += Counter([plan.rank])
    for plan in plans:
        yield from _delivered(plan, held[plan.rank])


def _delivered(plan: Plan, held: dict[Piece, Counter[int]]) -> Iterator[str]:
    others = [rank for rank in range(plan.size) if rank != plan.rank]
    needed: dict[Piece, Counter[int]] = {}
    for chunk in range(plan.chunks):
        if plan.kind == "gather":
            needed |= {Piece(rank, None, chunk): Counter([rank]) for rank in others}
        elif plan.kind == "all_to_all":
            needed |= {Piece(rank, plan.rank, chunk): Counter([rank]) for rank in others}
        elif others:
            needed[Piece(None, plan.rank, chunk)] = Counter(others)
    for piece, wanted in needed.items():
        got = held.get(piece, Counter())
        for rank in sorted((wanted - got).keys()):
            yield f"rank {plan.rank} never gets the part of rank {rank} of {piece}"
        for rank, extra in sorted((got - wanted).items()):
            yield (
                f"rank {plan.rank} gets the part of rank {rank} of {piece} "
                f"{wanted[rank] + extra} times instead of {'once' if wanted[rank] else 'never'}"
            )
    if plan.kind == "reduce_scatter":
        for piece, content in held.items():
            if piece not in needed and any(content.values()):
                yield f"{piece} stays with rank {plan.rank}, parts of {sorted(content.elements())}"
        return
    passed_on = {step.send.piece for step in plan.steps if step.send}
    for step in plan.steps:
        if step.receive and step.receive.piece not in needed.keys() | passed_on:
            yield f"rank {plan.rank} receives what it neither needs nor passes on: {step.receive}"


def _shape(plans: Sequence[Plan]) -> Iterator[str]:
    """The form that the pipelines execute."""
    for plan in plans:
        for place, step in enumerate(plan.steps):
            where = f"rank {plan.rank}, step {place}"
            if step.index != place:
                yield f"{where} says that it is step {step.index}"
            if (step.send is None) != (step.receive is None):
                lone = "send" if step.receive is None else "receive"
                yield f"{where} has a {lone} only; they are posted together"
            if step.send and step.receive and step.send.lane != step.receive.lane:
                yield (
                    f"{where} sends on lane {step.send.lane} and receives on lane "
                    f"{step.receive.lane}; they are posted as one batch"
                )
        yield from _arrivals_used(plan) if plan.own == "first" else _sends_made(plan)


def _arrivals_used(plan: Plan) -> Iterator[str]:
    before: Transfer | None = None
    for step in plan.steps:
        if step.index:
            brought = before.piece if before is not None else None
            needed = brought if brought and brought.target in (None, plan.rank) else None
            if step.compute != needed:
                yield (
                    f"rank {plan.rank} computes {step.compute or 'nothing'} in step {step.index}, "
                    f"but the step before brings {needed or 'nothing'} for it"
                )
        before = step.receive


def _sends_made(plan: Plan) -> Iterator[str]:
    made = [(s.index, s.compute) for s in plan.steps if s.compute and s.compute.chunk is not None]
    sent = [
        (s.index, s.send.piece)
        for s in plan.steps
        if s.send and s.send.piece.source in (None, plan.rank)
    ]
    for (made_in, piece), (sent_in, needed) in zip_longest(made, sent, fillvalue=(-1, None)):
        if piece != needed:
            yield (
                f"rank {plan.rank} makes {piece or 'nothing'} where it has to send "
                f"{needed or 'nothing'}"
            )
        elif made_in >= sent_in:
            yield f"rank {plan.rank} sends {piece} in step {sent_in}, made in step {made_in}"


def _sums(plans: Sequence[Plan]) -> Iterator[str]:
    first = plans[0]
    if first.kind != "reduce_scatter" or first.schedule.shape != "shifted":
        return  # a ring sums on the way: its order is that of its neighbours
    for plan in plans:
        distances = plan.schedule.distances(plan.size, plan.own)
        expected = [(plan.rank - k) % plan.size for k in distances]
        for chunk in range(plan.chunks):
            receives = [s.receive for s in plan.steps if s.receive]
            order = [r.source for r in receives if r.piece == Piece(None, plan.rank, chunk)]
            if order != expected:
                yield (
                    f"rank {plan.rank} adds the partials of chunk {chunk} in the order {order}, "
                    f"not {expected}: other bits than the collective"
                )


def _work(plans: Sequence[Plan]) -> Iterator[str]:
    for plan in plans:
        computed = [(s.index, s.compute) for s in plan.steps if s.compute is not None]
        counts = Counter(piece for _, piece in computed)
        for piece, count in counts.items():
            if count > 1:
                yield f"rank {plan.rank} computes {piece} {count} times"
        covered = Counter((plan.block(piece), piece.chunk) for piece in counts)
        for block in range(plan.size):
            chunks = [None] if block == plan.rank else range(plan.chunks)
            for chunk in chunks:
                if not covered[block, chunk]:
                    part = "its own block" if chunk is None else f"block {block} chunk {chunk}"
                    yield f"rank {plan.rank} never computes {part}"
        if computed:
            place = 0 if plan.own == "first" else -1
            if plan.block(computed[place][1]) != plan.rank:
                yield (
                    f"rank {plan.rank} computes {computed[place][1]} {plan.own} instead of its own "
                    "block: that transfer has nothing to hide behind"
                )


def rendezvous(
    operations: Sequence[Sequence[Plan]], *, cold: bool = False, batched: bool = True
) -> str | None:
    """Play plans through with HCCL's rules; ``None`` if they finish, else who waits for whom.

    The rules are those of :mod:`commfuse_npu.proof.rendezvous`.

    Args:
        operations: sets of plans that are posted one after the other on the same lanes, without
            waiting in between (a re-gather and a reduce-scatter in a backward, say).
        cold: the first use of a lane creates its communicator and holds the host until every rank
            has come to it.
        batched: post {send, receive} of a step as one batch; else as single operations, in the
            order of their source ranks.
    """
    group = Group("plans", tuple(range(operations[0][0].size)))
    programmes = [
        Programme(rank, _actions(rank, [plans[rank] for plans in operations], group, batched))
        for rank in group.ranks
    ]
    stuck = Rendezvous(programmes, opened=set() if cold else None).play()
    return None if stuck is None else stuck.text


def _actions(rank: int, plans: Sequence[Plan], group: Group, batched: bool) -> list[Action]:
    """What a rank does that posts each transfer as soon as its window and its data allow."""
    actions: list[Action] = []
    for number, plan in enumerate(plans):
        posts = [[t for t in (s.send, s.receive) if t is not None] for s in plan.steps]
        posts = [post for post in posts if post]
        brought: dict[Piece, Transfer] = {}
        for place, post in enumerate(posts):
            needs = []
            if place >= plan.window:
                needs += [t for t in posts[place - plan.window] if t.target == rank]
            for transfer in post:
                if transfer.source == rank and transfer.piece in brought and plan.forwards:
                    needs.append(brought[transfer.piece])
            brought |= {transfer.piece: transfer for transfer in post if transfer.target == rank}
            if needs:
                actions.append(Wait(tuple(End(number, transfer) for transfer in needs)))
            together = [post] if batched else [[t] for t in sorted(post, key=lambda t: t.source)]
            for transfers in together:
                ends = tuple(End(number, transfer) for transfer in transfers)
                actions.append(Post(group, transfers[0].lane, ends))
    return actions
