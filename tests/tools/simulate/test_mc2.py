"""MC2's tiling: what the host's formula gives, and the limits that it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.tools.simulate.mc2 import RANKS, tiling

many = settings(max_examples=300, deadline=None)
sizes = st.integers(256, 65534)


@many
@given(
    kind=st.sampled_from(["gather", "scatter"]),
    rows=st.integers(1, 40000),
    inner=sizes,
    outer=st.integers(1, 65536),
    ranks=st.sampled_from(RANKS),
    cores=st.sampled_from([20, 24]),
    ring=st.booleans(),
    ordered=st.booleans(),
)
def test_tiles_are_the_block(
    kind, rows: int, inner: int, outer: int, ranks: int, cores: int, ring: bool, ordered: bool
) -> None:
    found = tiling(kind, rows, inner, outer, ranks, cores, ring=ring, ordered=ordered)
    assert sum(found.rows) == rows
    assert min(found.rows) > 0
    assert len(found.rows) <= 16, "the queue holds no more"
    assert len(set(found.rows)) <= 2, "long ones and a short one"
    assert found.slowed in (1.0, 1.2, 1.5, 3.0)
    assert ranks > 2 or found.slowed == 1


@pytest.mark.parametrize(
    ("kind", "rows", "inner", "outer", "slowed"),
    [
        # Inner dimensions from 8192 and more than 5120 columns.
        ("gather", 1024, 8192, 5376, 1.5),
        ("gather", 1024, 8192, 5120, 1),
        ("scatter", 1024, 8192, 5376, 1.2),
        # A tile's operands beyond the L2 cache.
        ("gather", 1024, 16384, 16384, 3),
    ],
)
def test_transfers_beside_large_operands_are_slowed(kind, rows, inner, outer, slowed) -> None:
    assert tiling(kind, rows, inner, outer, 8, 20).slowed == slowed


def test_how_many_tiles() -> None:
    # They have 128 rows or more.
    assert tiling("gather", 255, 8192, 8192, 8, 20).rows == (255,)
    assert tiling("scatter", 255, 8192, 8192, 8, 20).rows == (255,)
    # A gather that is slowed has 8 at most.
    assert 1 < len(tiling("gather", 32768, 8192, 6144, 8, 20).rows) <= 8


@pytest.mark.parametrize("ring", [False, True])
def test_the_short_tile_covers_what_is_not_hidden(ring: bool) -> None:
    # Transfers are longer than the GEMM of an output projection: it begins with the short tile.
    first, *_, last = tiling("scatter", 4096, 512, 4096, 8, 20, ring=ring).rows
    assert first < last
    # The GEMM is the longer one: it ends with it.
    first, *_, last = tiling("gather", 4096, 4096, 3584, 8, 20, ring=ring).rows
    assert first > last
