"""Compiled programs: how many are cached, and what programs of several lengths share."""

import gc
from weakref import WeakSet

from commfuse_npu.plan import RankSpec, Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import GatherGemm

SPEC = RankSpec(Schedule(), 1, 4)


def test_programs_of_old_lengths_are_freed() -> None:
    programs = WeakSet[Program]()
    for rows in range(1, 4200):
        programs.add(GatherGemm(rows, 8, 8).program(SPEC))
    gc.collect()
    assert len(programs) <= 4096


def test_programs_of_all_lengths_share_their_transfers() -> None:
    short, long = (GatherGemm(rows, 8, 8).program(SPEC) for rows in (8, 16))
    for one, other in zip(short.posts, long.posts, strict=True):
        assert one.transfer is other.transfer
