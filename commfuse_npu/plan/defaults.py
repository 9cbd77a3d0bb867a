"""What becomes of the blocks of a tensor-parallel layer where nobody says it.

What a post of a point-to-point batch costs the host is measured when lanes are made; here it is
what the described machines have.  Both limits are simulated, for layers of three models and groups
of 2 to 8 ranks (``tests/tools/simulate/test_least_rows.py``).
"""

from __future__ import annotations

from commfuse_npu.plan.schedule import Shape

__all__ = [
    "DATA_PARALLEL_LANES",
    "POST_SECONDS",
    "block_rows",
    "least_rows",
    "usual_chunks",
    "usual_shape",
]

DATA_PARALLEL_LANES = 2
"""Of gradients, and of parameters.  Each lane has HCCL's buffers and a stream of the device's pool;
a bucket is long enough for two transfers at a time to fill the links."""

POST_SECONDS = 128e-6
"""Of a point-to-point batch on the host, where it was not measured (``configs/hardware``)."""

_HIDDEN = 4096
_NUMBERS, _OF_A_FEW = 2**16 * 1e6, 80_000 * 1e6
"""Numbers of a block per second of a post: the work beside a post takes as long as it."""


def block_rows(sequence: int, micro_batch: int, size: int, context_parallel: int = 1) -> int:
    """The rows of a rank's block: tokens of a micro-batch, of which each rank has its share.

    Args:
        sequence: tokens.
        micro_batch: sequences.
        size: of the tensor-parallel group.
        context_parallel: ranks that share a sequence.
    """
    return sequence * micro_batch // (size * context_parallel)


def usual_shape(size: int) -> Shape:
    """Of a tensor-parallel group inside a node: from three ranks on a chunk is one collective.

    A batch per peer is as fast where a post costs 40 us, and makes a layer of 8 ranks up to 1.6
    times as long where it costs 128.  Two ranks have one peer.
    """
    return "collective" if size > 2 else "shifted"


def least_rows(size: int, hidden: int | None = None, post: float = POST_SECONDS) -> int:
    """With fewer rows per block Megatron's own order is faster, or as fast, whatever is cut.

    What a post costs the host has to be less than the work beside it: a block has 2^16 numbers for
    each microsecond, 80,000 in groups of 3 to 7, which have less of it than larger ones and post
    more than two ranks; and 512 rows, because parts of a GEMM with fewer leave cores idle (two
    ranks, which gain without chunks, 256).  With 128 us that is of 4,096 features 2,048 rows (2,500
    at TP 4), of 8,192 features half.  From there on a layer takes 0.87 to 1.04 times as long as in
    Megatron's order, at typical figures.

    Args:
        size: of the tensor-parallel group.
        hidden: features of a row; 4,096 where nobody says.
        post: seconds that a post costs the host.
    """
    return max(256 if size <= 2 else 512, _rows(size, hidden, post))


def usual_chunks(
    size: int, rows: int, hidden: int | None = None, post: float = POST_SECONDS
) -> int:
    """The chunks of a tensor-parallel block: 2 where that pays, else 1.

    More chunks hide more where a post costs 15 us, and make a layer up to twice as long as
    Megatron's order where it costs 40: they have to be asked for.

    Args:
        size, hidden, post: as for :func:`least_rows`.
    """
    return 2 if rows >= max(512, _rows(size, hidden, post)) else 1


def _rows(size: int, hidden: int | None, post: float) -> int:
    numbers = _OF_A_FEW if 2 < size < 8 else _NUMBERS
    return round(numbers * post / (hidden or _HIDDEN))
