"""The schedules of the ops with attention, and the pieces of packed documents that a run sees."""

import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from commfuse_npu.ops import Documents, LinearOptions
from commfuse_npu.ops.attention_runs import options_for_attention
from commfuse_npu.ops.tuning import Tuning
from commfuse_npu.plan import PlanError, Schedule
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import watch_calls
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import ATTENTION, WITH_PROJECTION, one_layer
from tests.random_networks.compare import run_case

NODES = Schedule("two_level", node_size=2)
CAUSAL = {"causal": True, "one document": True, "documents": False, "full": False}
"""By mask: whether later blocks of queries see more keys."""


@pytest.mark.parametrize(
    ("schedule", "costs_rise", "expected"),
    [
        (Schedule(chunks=2), False, Schedule(chunks=2)),
        (Schedule(chunks=2), True, Schedule(chunks=2, causal=True)),
        (Schedule("collective", chunks=3), True, Schedule(chunks=3, causal=True)),
        (Schedule("collective"), False, Schedule()),
        (NODES, True, NODES),
    ],
)
def test_attention_has_lanes_and_causal_blocks_in_their_order(
    schedule: Schedule, costs_rise: bool, expected: Any
) -> None:
    assert options_for_attention(LinearOptions(schedule), costs_rise).schedule == expected


@on_ranks(2)
def test_attention_takes_causal_blocks_in_their_order(rank: int) -> None:
    """Unless the dgrad of the projection comes first, which costs the same for every block."""
    begun: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        note = lambda _, rule, name, like, schedule, *__: begun.append(schedule.causal)  # noqa: E731
        watch_calls(patch, Transport, "begin", note)
        for (mask, causal), op in product(CAUSAL.items(), ATTENTION):
            begun.clear()
            run_case(one_layer(op, 2, mask=mask), "fused")
            assert begun == [causal, causal and op != WITH_PROJECTION], (op, mask)


def test_four_chunks_replace_tuning() -> None:
    options = options_for_attention(LinearOptions(Schedule(chunks=2), tuning=Tuning()), False)
    assert (options.schedule.chunks, options.tuning) == (4, None)


def test_chunks_of_options_are_those_of_their_schedule() -> None:
    two_level = Schedule("two_level", node_size=2)
    options = LinearOptions(two_level, chunks=3, main_grad=True)
    assert options == LinearOptions(replace(two_level, chunks=3), main_grad=True)
    with pytest.raises(PlanError, match="chunks is 0; it must be a whole number from 1"):
        LinearOptions(chunks=0)


def test_documents_from_cumulative_lengths_have_the_same_pieces() -> None:
    given = Documents([5, 6, 12], 12)
    documents = Documents.from_cu_seqlens(torch.tensor([0, 5, 6, 12], dtype=torch.int32), 12)
    assert documents.pieces(slice(2, 8)) == given.pieces(slice(2, 8))
    with pytest.raises(ValueError, match="begins with 5; it has to begin with 0"):
        Documents.from_cu_seqlens(torch.tensor([5, 6, 12]), 12)


def test_no_piece_of_a_document_is_empty() -> None:
    for ends, run, pieces in (([5, 6, 12], slice(5, 6), 1), ([3, 3, 12], slice(2, 8), 2)):
        assert len(Documents(ends, 12).pieces(run)[1]) == pieces


def test_runs_of_queries_are_cut_in_linear_time() -> None:
    """Lines that are executed to cut a sample of one-token documents into many runs."""
    tokens, lines, size = 2048, 0, 4
    documents = Documents(range(1, tokens + 1), tokens)

    def count(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    for start in range(0, tokens, size):
        documents.pieces(slice(start, start + size))
    sys.settrace(None)
    assert lines < 40 * tokens


@pytest.mark.parametrize(
    ("ends", "length", "batch", "message"),
    [
        ([5, 3, 8], 8, 1, "end 3 follows 5; ends have to rise"),
        ([5, 9], 8, 1, "end 9 follows 5; .* to at most 8, 1 samples of 8"),
        ([5, 12, 16], 8, 2, "none ends at 8, with sample 0: one goes on in the next"),
    ],
)
def test_ends_that_are_none_are_refused(ends, length, batch, message) -> None:
    with pytest.raises(ValueError, match=message):
        Documents(ends, length, batch)
