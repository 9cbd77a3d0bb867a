"""Which pieces of packed documents a run of queries has."""

from __future__ import annotations

import pytest

from commfuse_npu.kernels import Piece
from commfuse_npu.ops.attention_mask import Documents


def counted(documents: Documents, start: int, stop: int) -> tuple[slice, list[tuple[int, ...]]]:
    """The keys, and per piece the sample and the bounds of queries and keys in the sequence."""
    keys, pieces = documents.pieces(slice(start, stop))
    return keys, [
        (
            piece.sample,
            piece.queries.start + start,
            piece.queries.stop + start,
            piece.keys.start + keys.start,
            piece.keys.stop + keys.start,
        )
        for piece in pieces
    ]


@pytest.mark.parametrize(
    ("run", "keys", "pieces"),
    [
        # The first document cut at its end, a whole one, the begin of the last.
        ((3, 9), (0, 9), [(0, 3, 5, 0, 5), (0, 5, 6, 5, 6), (0, 6, 9, 6, 9)]),
        # In the middle of one: keys from its begin on, none after the last query.
        ((8, 10), (6, 10), [(0, 8, 10, 6, 10)]),
        # From border to border.
        ((5, 6), (5, 6), [(0, 5, 6, 5, 6)]),
        ((0, 12), (0, 12), [(0, 0, 5, 0, 5), (0, 5, 6, 5, 6), (0, 6, 12, 6, 12)]),
    ],
)
def test_documents_are_cut_by_a_run(run, keys, pieces) -> None:
    assert counted(Documents([5, 6, 12], 12), *run) == (slice(*keys), pieces)


def test_samples_have_documents_of_their_own() -> None:
    documents = Documents([2, 8, 11, 16], 8, 2)
    keys, pieces = counted(documents, 4, 6)
    # The keys of both begin where the earlier of the two documents does.
    assert keys == slice(2, 6)
    assert pieces == [(0, 4, 6, 2, 6), (1, 4, 6, 3, 6)]
    assert documents.pieces(slice(4, 6)) == (
        keys,
        (Piece(0, slice(0, 2), slice(0, 4)), Piece(1, slice(0, 2), slice(1, 4))),
    )


def test_rows_behind_the_last_end_are_a_document() -> None:
    assert counted(Documents([3], 8), 2, 8)[1] == [(0, 2, 3, 0, 3), (0, 3, 8, 3, 8)]


def test_an_end_that_comes_twice_is_one() -> None:
    assert counted(Documents([3, 8, 8], 8), 0, 8)[1] == [(0, 0, 3, 0, 3), (0, 3, 8, 3, 8)]


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
