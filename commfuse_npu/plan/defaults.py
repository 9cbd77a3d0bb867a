"""Defaults for the shape, the chunks and the least rows of tensor-parallel layers.

The host time of posting a point-to-point batch is measured when lanes are created; the default here
is that of the described machines.  Both limits are simulated, for layers of three models and groups
of 2 to 8 ranks (``tests/tools/simulate/test_min_rows.py``).
"""

from __future__ import annotations

from commfuse_npu.plan.schedule import Shape

__all__ = [
    "DATA_PARALLEL_LANES",
    "POST_SECONDS",
    "block_rows",
    "default_chunks",
    "default_shape",
    "min_rows_to_fuse",
]

DATA_PARALLEL_LANES = 2
"""For gradients and for parameters.  Each lane takes HCCL's buffers and a stream of the device's
pool, and buckets are long enough for two transfers at a time to fill the links."""

POST_SECONDS = 128e-6
"""Host seconds to post a point-to-point batch, if not measured (``configs/hardware``)."""

_HIDDEN = 4096
_NUMBERS = 2**16 * 1e6
_OF_A_FEW = 80_000 * 1e6
"""Elements of a block per second of a post, so that the work on them takes as long as the post."""


def block_rows(sequence: int, micro_batch: int, size: int, context_parallel: int = 1) -> int:
    """The rows of a rank's block: its share of the tokens of a micro-batch.

    Args:
        sequence: tokens per sequence.
        micro_batch: sequences per micro-batch.
        size: of the tensor-parallel group.
        context_parallel: ranks that share a sequence.
    """
    return sequence * micro_batch // (size * context_parallel)


def default_shape(size: int) -> Shape:
    """The default shape for a tensor-parallel group inside a node: ``collective`` from 3 ranks on.

    A batch per peer is as fast if a post costs 40 us, but makes a layer of 8 ranks up to 1.6 times
    as long if it costs 128.  Two ranks have one peer.
    """
    return "collective" if size > 2 else "shifted"


def min_rows_to_fuse(size: int, hidden: int | None = None, post: float = POST_SECONDS) -> int:
    """The least rows per block for which fusing pays; below, Megatron's order is as fast or faster.

    A post must cost the host less than the work it overlaps with.  So a block needs 2^16 elements
    per microsecond of a post, or 80,000 in groups of 3 to 7 ranks, which have less work than larger
    groups and more posts than two ranks.  It also needs 512 rows, because a part of a GEMM with
    fewer leaves cores idle (256 for two ranks, which gain without chunks).  At 128 us, 4,096
    features need 2,048 rows (2,500 at TP 4), and 8,192 features half.  From there on a layer takes
    0.87 to 1.04 times as long as in Megatron's order, at typical figures (simulated).

    Args:
        size: of the tensor-parallel group.
        hidden: features of a row; ``None`` means 4,096.
        post: seconds that a post costs the host.
    """
    return max(256 if size <= 2 else 512, _rows(size, hidden, post))


def default_chunks(
    size: int, rows: int, hidden: int | None = None, post: float = POST_SECONDS
) -> int:
    """The default number of chunks of a tensor-parallel block: 2 where that pays, else 1.

    More chunks are never the default: they hide more if a post costs 15 us, but make a layer up to
    twice as long as Megatron's order if it costs 40.

    Args:
        size, hidden, post: as for :func:`min_rows_to_fuse`.
    """
    return 2 if rows >= max(512, _rows(size, hidden, post)) else 1


def _rows(size: int, hidden: int | None, post: float) -> int:
    numbers = _OF_A_FEW if 2 < size < 8 else _NUMBERS
    return round(numbers * post / (hidden or _HIDDEN))
