"""The schedules of the ops with attention, and the pieces of packed documents that a run sees."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_npu.kernels import Piece
from commfuse_npu.ops import Documents, LinearOptions
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


def test_four_chunks_replace_tuning() -> None:
    options = options_for_attention(LinearOptions(Schedule(chunks=2), tuning=Tuning()), False)
    assert (options.schedule.chunks, options.tuning) == (4, None)


@pytest.mark.parametrize(
    ("documents", "run", "keys", "pieces"),
    [
        # The end of the first document, a whole one, the beginning of the last.
        (Documents([5, 6, 12], 12), (3, 9), (0, 9),
         [(0, 0, 2, 0, 5), (0, 2, 3, 5, 6), (0, 3, 6, 6, 9)]),
        # Inside one document: keys from its beginning to the last query.
        (Documents([5, 6, 12], 12), (8, 10), (6, 10), [(0, 0, 2, 0, 4)]),
        # From the end of one document to the beginning of another.
        (Documents([5, 6, 12], 12), (5, 6), (5, 6), [(0, 0, 1, 0, 1)]),
        # Two samples: the keys of both begin at the earlier start of the two documents.
        (Documents([2, 8, 11, 16], 8, 2), (4, 6), (2, 6), [(0, 0, 2, 0, 4), (1, 0, 2, 1, 4)]),
        # Rows after the last end form a document; a repeated end counts once.
        (Documents([3, 3], 8), (2, 8), (0, 8), [(0, 0, 1, 0, 3), (0, 1, 6, 3, 8)]),
    ],
)  # fmt: skip
def test_documents_are_cut_by_a_run(documents: Documents, run, keys, pieces) -> None:
    """A piece is given as the sample and the bounds of its queries and keys."""
    expected = [Piece(b, slice(*bounds[:2]), slice(*bounds[2:])) for b, *bounds in pieces]
    assert documents.pieces(slice(*run)) == (slice(*keys), tuple(expected))


@pytest.mark.parametrize(
    ("ends", "length", "batch", "whole"),
    [([8], 8, 1, True), ([8, 16], 8, 2, True), ([8, 9, 16], 8, 2, False), ([], 8, 1, True)],
)
def test_whole_samples(ends, length, batch, whole) -> None:
    assert Documents(ends, length, batch).whole is whole


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
