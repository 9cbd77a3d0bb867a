"""The order of instructions that the rules compile, and the cost of compiling."""

from cProfile import Profile

import pytest

from commfuse_npu.plan import rules
from commfuse_npu.plan.instructions import Compute, Post, Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules.blocks import Blocks
from commfuse_npu.plan.schedule import RankSpec, Schedule


def order_of(program: Program) -> list[str]:
    """Sends, waits for received pieces, and compute calls, in program order."""
    ends = (end for post in program.posts for way, end in post.ends if way == "receive")
    arriving = {end.transfer.step: end.transfer.piece.split()[0] for end in ends}
    steps = []
    for step in program.code:
        if isinstance(step, Post):
            steps.append(f"send {step.send.transfer.piece.split()[0]}")
        elif isinstance(step, Wait) and not step.on_side_stream:
            pieces = dict.fromkeys(arriving[number] for number in step.steps)
            steps.append(f"wait {' and '.join(pieces)}")
        elif isinstance(step, Compute):
            steps.append(step.work)
    return steps


MADE, USED = ["make", "send block"], ["use", "wait block"]


@pytest.mark.parametrize(
    ("blocks", "uses", "wgrad", "order"),
    [
        # A block is sent as soon as it is made, own block last; used on arrival, own block first.
        ("made", False, False, [*MADE * 2, "make", "wait block"]),
        ("given", True, True, [*["send block"] * 2, "wgrad", *USED * 2, "use"]),
        # Weight gradient and work on the own block come after the last send.
        ("made", True, True, [*MADE * 2, "make", "wgrad", *USED * 2, "use"]),
    ],
)
def test_blocks_are_sent_when_made_and_used_on_arrival(
    blocks: Blocks, uses: bool, wgrad: bool, order: list[str]
) -> None:
    spec = RankSpec(Schedule(), 0, 3)
    actual = order_of(rules.ExchangeBlocks(6, 4, blocks, uses, False, wgrad).program(spec))
    assert actual == order


def test_scratch_of_two_groups_is_used_again() -> None:
    elements = []
    for chunks in (2, 4):
        spec = RankSpec(Schedule(chunks=chunks), 3, 8)
        elements.append(sum(rules.GemmScatter(64, 128, 4096).program(spec).regions.values()))
    assert elements[1] == elements[0] // 2


def test_a_stream_waits_for_a_post_once() -> None:
    """Waiting for what a batch receives completes its send."""
    program = rules.GatherGemm(4, 8, 8).program(RankSpec(Schedule(chunks=2), 0, 2))
    waits = [step.steps for step in program.code if isinstance(step, Wait)]
    assert waits == [(0,), (1,)]


def test_a_program_reads_as_text() -> None:
    text = str(rules.GemmScatter(4, 8, 8).program(RankSpec(Schedule(), 0, 2)))
    assert text.splitlines() == [
        "GemmScatter(rows=4, inputs=8, outputs=8), rank 0 of 2",
        "   0  product 0[4:8] = gemm(a[4:8], weight[0:8, 0:8])",
        "   1  post step 0, lane 0: partial for 1 -> rank 1, partial for 0 <- rank 1",
        "   2  product 0[0:4] = gemm(a[0:4], weight[0:8, 0:8])",
        "   3  wait for step 0",
        "   4  out[0:4] = partials 0[0:4] + product 0[0:4]",
    ]


@pytest.mark.parametrize(
    "rule",
    [rules.BucketGather(4099), rules.BucketScatter(4099, 1, 2), rules.ProduceScatter(67, 3)],
)
def test_compiling_takes_work_in_proportion_to_the_transfers(rule) -> None:
    """Counts function calls; compiling a shape for hundreds of ranks once took seconds."""
    counts = []
    for size in (16, 128):
        spec, profile = RankSpec(Schedule(chunks=4, lanes=7), 1, size), Profile()
        profile.runcall(rule.program, spec)
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    assert counts[1] < 12 * counts[0]
