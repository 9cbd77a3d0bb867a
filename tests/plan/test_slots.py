"""Slots of pipeline stages: pairs of forward and backward, consistent with the neighbors."""

import pytest

from commfuse_npu.plan.slots import (
    Step,
    in_flight_without,
    most_in_flight,
    paired_microbatches,
    slots,
)

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
    messages: set[tuple[str, int, Step]] = set()
    for row in zip(*plans, strict=True):
        arrives = set(messages)
        for stage, slot in enumerate(row):
            if slot.forward is not None and (stage, slot.forward.chunk) != (0, 0):
                microbatch, chunk = slot.forward
                source = (stage - 1, chunk) if stage else (stages - 1, chunk - 1)
                assert ("forward", source[0], Step(microbatch, source[1])) in arrives
            if slot.backward is not None:
                microbatch, chunk = slot.backward
                assert ("held", stage, slot.backward) in arrives
                if (stage, chunk) != (stages - 1, chunks - 1):
                    source = (stage + 1, chunk) if stage + 1 < stages else (0, chunk + 1)
                    assert ("backward", source[0], Step(microbatch, source[1])) in arrives
        # A message that is not used in the next slot is lost: buffers hold one message.
        messages = {message for message in messages if message[0] == "held"}
        for stage, slot in enumerate(row):
            if slot.forward is not None:
                messages |= {("forward", stage, slot.forward), ("held", stage, slot.forward)}
            if slot.backward is not None:
                messages.add(("backward", stage, slot.backward))
                messages.remove(("held", stage, slot.backward))
    assert not [message for message in messages if message[0] == "held"]
    expected = {Step(m, c) for m in range(microbatches) for c in range(chunks)}
    for plan in plans:
        assert {slot.forward for slot in plan if slot.forward} == expected
        assert {slot.backward for slot in plan if slot.backward} == expected


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
