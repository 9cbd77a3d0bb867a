"""What becomes of the blocks of a tensor-parallel layer where nobody says it.

Both limits are those of the described machines, simulated, for layers of three models and groups of
2 to 8 ranks (``docs/layers_tables.md``).
"""

from __future__ import annotations

__all__ = ["DATA_PARALLEL_LANES", "block_rows", "least_rows", "usual_chunks"]

DATA_PARALLEL_LANES = 2
"""Of gradients, and of parameters.  Each lane has HCCL's buffers and a stream of the device's pool;
a bucket is long enough for two transfers at a time to fill the links."""


def block_rows(sequence: int, micro_batch: int, size: int, context_parallel: int = 1) -> int:
    """The rows of a rank's block: tokens of a micro-batch, of which each rank has its share.

    Args:
        sequence: tokens.
        micro_batch: sequences.
        size: of the tensor-parallel group.
        context_parallel: ranks that share a sequence.
    """
    return sequence * micro_batch // (size * context_parallel)


def least_rows(size: int) -> int:
    """With fewer rows per block Megatron's own order is faster, or as fast, whatever is cut.

    Parts of its GEMMs leave cores idle, and the host falls behind.  With so many a layer takes 0.90
    to 1.02 times as long as in Megatron's order, with half of them 1.01 to 1.32 times (but .97 for
    Llama 3 70B at TP 4 on an A2 server), at typical figures.
    """
    return 256 if size == 2 else 512


def usual_chunks(size: int, rows: int) -> int:
    """The chunks of a tensor-parallel block of so many rows.

    Few, because each is a transfer per peer to post, which no cache of HCCL's makes cheaper: where
    a post costs the host 40 us, 2 chunks are at most 3 % slower than Megatron's order at TP 8, 4
    chunks 62 % (simulated, Llama 3 8B, 4,096 tokens, A2).  ``--commfuse-chunks`` or tuning asks for
    more where a post was measured to cost less.
    """
    return 1 if rows < (1024 if size == 2 else 512) else 2
