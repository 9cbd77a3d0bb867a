"""Slots of pipeline stages: pairs of forward and backward, consistent with the neighbors."""

from itertools import product

import pytest

from commfuse_npu.plan.slots import (
    Step,
    in_flight_without,
    most_in_flight,
    paired_microbatches,
    slots,
)

SIDES = "forward", "backward"
LAYOUTS = [
    (stages, chunks, microbatches)
    for stages in (1, 2, 3, 4, 8)
    for chunks in (1, 2, 3)
    for microbatches in (1, 2, 3, 4, 8, 16)
    if chunks == 1 or (stages > 1 and microbatches % stages == 0)
]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), LAYOUTS)
def test_what_a_slot_needs_was_made_one_slot_before(
    stages: int, chunks: int, microbatches: int
) -> None:
    plans = [slots(stages, stage, chunks, microbatches) for stage in range(stages)]
    assert len({len(plan) for plan in plans}) == 1
    done: dict[tuple[str, int, Step], int] = {}
    for stage, plan in enumerate(plans):
        for at, slot in enumerate(plan):
            for side in SIDES:
                if (step := getattr(slot, side)) is not None:
                    assert done.setdefault((side, stage, step), at) == at, "done once"
    steps = {Step(m, c) for m in range(microbatches) for c in range(chunks)}
    assert done.keys() == set(product(SIDES, range(stages), steps))
    for (side, stage, step), at in done.items():
        # Parts of the model are numbered across stages and chunks; buffers hold one message, so one
        # that is not used in the next slot is lost.
        part = step.chunk * stages + stage
        chunk, source = divmod(part - 1 if side == "forward" else part + 1, stages)
        if chunk in range(chunks):
            assert done[side, source, Step(step.microbatch, chunk)] == at - 1
        assert done["forward", stage, step] < done["backward", stage, step]


def test_how_many_have_a_partner() -> None:
    assert paired_microbatches(slots(1, 0, 1, 8)) == (7, 8)
    assert paired_microbatches(slots(4, 0, 1, 16)) == (16 - 2 * 4 + 1, 16)
    assert paired_microbatches(slots(4, 3, 1, 16)) == (15, 16)
    assert paired_microbatches(slots(4, 0, 2, 4))[0] == 0
    assert paired_microbatches(slots(1, 0, 1, 1)) == (0, 1)


def test_a_virtual_pipeline_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="6 micro-batches are not a multiple of the 4 stages"):
        slots(4, 0, 2, 6)


@pytest.mark.parametrize(
    ("layout", "without", "most"),
    [
        ((1, 0, 1, 8), 1, 2),
        ((4, 0, 1, 8), 4, 8),
        ((4, 3, 1, 8), 1, 2),
        ((4, 0, 1, 2), 2, 2),
        ((4, 0, 2, 4), 8, 8),
        ((2, 0, 2, 8), 5, 6),
        ((2, 1, 2, 8), 3, 4),
    ],
)
def test_activations_in_flight(layout: tuple[int, int, int, int], without: int, most: int) -> None:
    """Without overlap: Megatron's warm-up and one more.  With it both sides of a slot count.

    In a plain pipeline: 2 (p - s) - 1 when a slot begins, plus the forward of the slot itself.
    """
    assert in_flight_without(*layout) == without
    assert most_in_flight(slots(*layout)) == most
