"""What becomes of the blocks of a tensor-parallel layer where nobody says it.

What a post of a point-to-point batch costs the host was measured by nobody yet.  Both limits are
those of the described machines at 40 us a post, simulated, for layers of three models and groups of
2 to 8 ranks (``tests/tools/simulate/test_least_rows.py``).
"""

from __future__ import annotations

__all__ = ["DATA_PARALLEL_LANES", "block_rows", "least_rows", "usual_chunks"]

DATA_PARALLEL_LANES = 2
"""Of gradients, and of parameters.  Each lane has HCCL's buffers and a stream of the device's pool;
a bucket is long enough for two transfers at a time to fill the links."""

_HIDDEN = 4096


def block_rows(sequence: int, micro_batch: int, size: int, context_parallel: int = 1) -> int:
    """The rows of a rank's block: tokens of a micro-batch, of which each rank has its share.

    Args:
        sequence: tokens.
        micro_batch: sequences.
        size: of the tensor-parallel group.
        context_parallel: ranks that share a sequence.
    """
    return sequence * micro_batch // (size * context_parallel)


def least_rows(size: int, hidden: int | None = None) -> int:
    """With fewer rows per block Megatron's own order is faster, or as fast, whatever is cut.

    Each rank posts a batch per peer, and what a post costs the host has to be less than the work
    beside it: a block has at least 2^19 numbers per rank of the group, and 256 rows, because parts
    of a GEMM with fewer leave cores idle: of 4,096 features 256 rows at TP 2, 512 at TP 4, 1,024 at
    TP 8, of 8,192 features half, but 256.  From there on a layer takes 0.88 to 1.02 times as long
    as in Megatron's order, at typical figures and posts of 15 to 40 us; with half as many rows 1.01
    to 1.32 times.

    Args:
        size: of the tensor-parallel group.
        hidden: features of a row; 4,096 where nobody says.
    """
    return max(256, size * 2**19 // (hidden or _HIDDEN))


def usual_chunks(size: int, rows: int, hidden: int | None = None) -> int:
    """The chunks of a tensor-parallel block: 2 where that pays at 40 us a post, else 1.

    More chunks hide more where a post costs 15 us, and make a layer up to twice as long as
    Megatron's order where it costs 40: they have to be asked for.

    Args:
        hidden: features of a row; 4,096 where nobody says.
    """
    return 2 if rows >= (1024 if size == 2 else 2**22 // (hidden or _HIDDEN)) else 1
