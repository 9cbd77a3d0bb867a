"""The rules that compile programs: one per kind of operation.

Legend: ``n`` ranks, ``r`` this rank, ``s`` rows of a rank's block, ``c`` chunks.  The own block is
first or last (:mod:`commfuse_npu.plan.schedule`); chunk j of *all* peers is one piece of work::

    gather_gemm    compute | own      | chunk 0 of all | chunk 1 of all |
                   links   | chunk 0 ............ | chunk 1 ........... |

    gemm_scatter   compute | columns 0 of all | columns 1: peers | own  | sums
                   links   |                  | columns 0 ..... | columns 1 ... |

A rule returns the :class:`~commfuse_npu.plan.program.Program` of one rank.  Its docstring lists the
work, the functions that the operation provides.  The lines below it (``equals``) name the
operation's buffers and compute the result.  The first dimension of all matrices is rows; a block is
the ``s`` rows of one rank in a matrix of ``n * s``.
"""

from __future__ import annotations

from commfuse_npu.plan.rules.blocks import (
    Blocks,
    bucket_gather,
    bucket_scatter,
    exchange,
    gather_use,
    produce_scatter,
)
from commfuse_npu.plan.rules.linear import (
    column_backward,
    gather_gemm,
    gemm_scatter,
)
from commfuse_npu.plan.rules.pieces import Piece
from commfuse_npu.plan.rules.rule import RULES, Carrier, Rule

__all__ = [
    "RULES",
    "Blocks",
    "Carrier",
    "Piece",
    "Rule",
    "bucket_gather",
    "bucket_scatter",
    "column_backward",
    "exchange",
    "gather_gemm",
    "gather_use",
    "gemm_scatter",
    "produce_scatter",
]
