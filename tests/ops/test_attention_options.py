"""The schedules of the ops with attention."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_npu.ops import LinearOptions
from commfuse_npu.ops.attention_runs import options_for_attention
from commfuse_npu.plan import Schedule
from commfuse_npu.tuning import Tuning

NODES = Schedule("two_level", node_size=2)


@pytest.mark.parametrize(
    ("schedule", "costs_rise", "expected"),
    [
        (Schedule(chunks=2, taper=2.0), False, Schedule(chunks=2)),
        (Schedule(chunks=2, taper=2.0), True, Schedule(chunks=2, causal=True)),
        (Schedule("collective", chunks=3), True, Schedule(chunks=3, causal=True)),
        (Schedule("collective"), False, Schedule()),
        (NODES, True, NODES),
    ],
)
def test_runs_of_queries_are_even_and_causal_blocks_in_their_order(
    schedule: Schedule, costs_rise: bool, expected: Any
) -> None:
    assert options_for_attention(LinearOptions(schedule), costs_rise).schedule == expected


def test_four_chunks_replace_tuning_where_the_result_is_scattered() -> None:
    options = LinearOptions(Schedule(chunks=2), tuning=Tuning())
    scattered = options_for_attention(options, False, scattered=True)
    assert (scattered.schedule.chunks, scattered.tuning) == (4, None)
    assert options_for_attention(options, False).schedule.chunks == 2
