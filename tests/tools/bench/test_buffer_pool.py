"""Scratch memory that is used again."""

from __future__ import annotations

import torch

from commfuse_npu.tools.bench.buffer_pool import BufferPool

CPU = torch.device("cpu")


def test_a_buffer_comes_back_and_the_first_rows_of_a_longer_one_serve_too() -> None:
    pool = BufferPool()
    long = pool.take((16, 4), torch.float32, CPU)
    pool.give_back([long])
    assert pool.take((16, 4), torch.float32, CPU) is long
    pool.give_back([long])
    part = pool.take((9, 4), torch.float32, CPU)
    assert part.shape == (9, 4)
    assert part.is_contiguous()
    assert part.data_ptr() == long.data_ptr()
    assert len(pool) == 0, "lent as a whole"
    other = pool.take((9, 4), torch.float32, CPU)
    assert other.data_ptr() != long.data_ptr()
    pool.give_back([part, other])
    assert pool.idle_bytes == (16 + 9) * 4 * 4
    assert pool.take((9, 4), torch.float32, CPU) is other, "the shortest that will do"
    assert pool.take((16, 4), torch.float32, CPU) is long


def test_nothing_else_serves() -> None:
    pool = BufferPool()
    given = pool.take((16, 4), torch.float32, CPU)
    pool.give_back([given])
    for shape, dtype in (
        ((7, 4), torch.float32),  # too long by more than twice
        ((17, 4), torch.float32),
        ((16, 5), torch.float32),
        ((16, 2, 2), torch.float32),
        ((16, 4), torch.bfloat16),
    ):
        assert pool.take(shape, dtype, CPU).data_ptr() != given.data_ptr()
    assert len(pool) == 1


def test_what_is_kept_is_limited() -> None:
    pool = BufferPool(keep_bytes=1024)
    first, second = (pool.take((n, 64), torch.float32, CPU) for n in (2, 3))
    pool.give_back([first])
    pool.give_back([second])
    assert len(pool) == 1
    assert pool.take((3, 64), torch.float32, CPU) is second
