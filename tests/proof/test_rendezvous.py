"""HCCL's rules for opening links, checked by hand: when a link opens, and which rank blocks."""

from commfuse_npu.plan.instructions import Transfer
from commfuse_npu.proof.rendezvous import (
    Group,
    PostBatch,
    Rendezvous,
    Script,
    TransferEnd,
    WaitForEnds,
)

GROUP = Group("three", (10, 11, 12))
"""Global ranks of the members."""

OPEN = {(GROUP, (lane, *pair)) for lane in (0, 1) for pair in ((10, 11), (10, 12), (11, 12))}
"""All links."""


def swap(rank: int, peer: int, lane: int, step: int = 0) -> PostBatch:
    """The batch in which two group ranks send to each other."""
    pairs = ((rank, peer), (peer, rank))
    ends = (TransferEnd("it", Transfer(step, lane, a, b, f"block {a}")) for a, b in pairs)
    return PostBatch(GROUP, lane, tuple(ends))


def simulate(*by_place: list[PostBatch | WaitForEnds], opened: set = OPEN) -> str | None:
    scripts = [Script(GROUP.ranks[k], actions) for k, actions in enumerate(by_place)]
    stuck = Rendezvous(scripts, opened).simulate()
    return None if stuck is None else stuck.text


def test_a_host_is_held_until_its_peer_comes() -> None:
    first = [swap(0, 1, 0, 0), swap(0, 1, 1, 1)]
    other = [swap(1, 0, 1, 1), swap(1, 0, 0, 0)]
    assert simulate(first, other, []) is None, "links are open, nobody waits in between"
    assert simulate(first, other, [], opened=set()) == (
        "deadlock: rank 10 waits for rank 11 to open lane 0 between them for block 0 from "
        "rank 0 to rank 1 (step 0, lane 0) of it; rank 11 waits for rank 10 to open lane 1 between "
        "them for block 1 from rank 1 to rank 0 (step 1, lane 1) of it; and so round to rank 10"
    )
    both = {(GROUP, (lane, 10, 11)) for lane in (0, 1)}
    assert simulate(first, other, [], opened=both) is None


def test_a_post_that_nobody_waits_for_has_to_complete() -> None:
    assert str(simulate([swap(0, 1, 0)], [], [])).startswith(
        "deadlock: rank 10 waits on lane 0 to send block 0"
    )


def test_a_certain_deadlock_comes_before_an_uncertain_one() -> None:
    scripts = [
        Script(10, [swap(0, 2, 0), WaitForEnds(swap(0, 2, 0).ends)]),
        Script(11, [WaitForEnds(swap(1, 0, 0).ends)]),
        Script(12, [], open_ended=True),
    ]
    stuck = Rendezvous(scripts, OPEN).simulate()
    assert stuck is not None
    assert stuck.certain
    assert "rank 11 waits for block 1" in stuck.text
