"""HCCL's rules for opening links, checked by hand: when a link opens, and which rank blocks."""

from commfuse_npu.plan.instructions import Transfer
from commfuse_npu.proof.rendezvous import End, Group, Meet, Post, Rendezvous, Script, Wait

GROUP = Group("three", (10, 11, 12))
"""Global ranks of the members."""


def swap(rank: int, peer: int, lane: int, step: int = 0) -> Post:
    """The batch in which two group ranks send to each other."""
    pairs = ((rank, peer), (peer, rank))
    ends = (End("it", Transfer(step, lane, a, b, f"block {a}")) for a, b in pairs)
    return Post(GROUP, lane, tuple(ends))


def simulate(*by_place: list[Post | Wait | Meet], opened: set | None = None) -> str | None:
    scripts = [Script(GROUP.ranks[k], actions) for k, actions in enumerate(by_place)]
    stuck = Rendezvous(scripts, opened=opened).simulate()
    return None if stuck is None else stuck.text


def test_a_host_is_held_until_its_peer_comes() -> None:
    first = [swap(0, 1, 0, 0), swap(0, 1, 1, 1)]
    other = [swap(1, 0, 1, 1), swap(1, 0, 0, 0)]
    assert simulate(first, other, []) is None, "links are open, nobody waits in between"
    assert simulate(first, other, [], opened=set()) == (
        "deadlock (cold): rank 10 waits for rank 11 to open lane 0 between them for block 0 from "
        "rank 0 to rank 1 (step 0, lane 0) of it; rank 11 waits for rank 10 to open lane 1 between "
        "them for block 1 from rank 1 to rank 0 (step 1, lane 1) of it; and so round to rank 10"
    )
    both = {(GROUP, (lane, 10, 11)) for lane in (0, 1)}
    assert simulate(first, other, [], opened=both) is None


def test_a_lane_is_opened_per_pair() -> None:
    """Rank 10 uses the lane with rank 12 only after it is done with rank 11."""
    first = [swap(0, 1, 0), Wait(swap(0, 1, 0).ends), swap(0, 2, 0, 1)]
    assert simulate(first, [swap(1, 0, 0)], [swap(2, 0, 0, 1)], opened=set()) is None
    absent = simulate(first, [swap(1, 0, 0)], [], opened=set())
    assert absent == (
        "deadlock (cold): rank 10 waits for rank 12 to open lane 0 between them for block 0 from "
        "rank 0 to rank 2 (step 1, lane 0) of it; and rank 12 has nothing more to do"
    )


def test_a_meeting_is_of_all_ranks() -> None:
    meet = Meet(GROUP, 0, "the end")
    assert simulate([meet], [meet], [meet]) is None
    assert simulate([meet], [meet], []) == (
        "deadlock (warm): rank 10 waits for rank 12 to come to the end; "
        "and rank 12 has nothing more to do"
    )


def test_a_lane_goes_on_to_a_batch_whose_peer_already_waits() -> None:
    """Rank 0 completes three batches on a lane, one after the other, once rank 1 has posted."""
    group = Group("four", (0, 1, 2, 3))
    swaps = {2: [(2, 0)], 3: [(3, 0)], 0: [(0, 1), (0, 2), (0, 3)], 1: [(1, 0)]}
    scripts = [
        Script(rank, [swap(*pair, 0, max(pair))._replace(group=group) for pair in pairs])
        for rank, pairs in swaps.items()
    ]
    assert Rendezvous(scripts).simulate() is None


def test_a_post_that_nobody_waits_for_has_to_complete() -> None:
    assert str(simulate([swap(0, 1, 0)], [], [])).startswith(
        "deadlock (warm): rank 10 waits on lane 0 to send block 0"
    )


def test_a_certain_deadlock_comes_before_an_uncertain_one() -> None:
    scripts = [
        Script(10, [swap(0, 2, 0), Wait(swap(0, 2, 0).ends)]),
        Script(11, [Wait(swap(1, 0, 0).ends)]),
        Script(12, [], open_ended=True),
    ]
    stuck = Rendezvous(scripts).simulate()
    assert stuck is not None
    assert stuck.certain
    assert "rank 11 waits for block 1" in stuck.text
