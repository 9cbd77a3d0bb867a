"""The rules that compile programs: one per kind of operation.

Legend: ``n`` ranks, ``r`` this rank, ``s`` rows of a rank's block, ``c`` chunks.  The own block is
first or last (:mod:`commfuse_npu.plan.schedule`); chunk j of *all* peers is one piece of work::

    GatherGemm     compute | own      | chunk 0 of all | chunk 1 of all |
                   links   | chunk 0 ............ | chunk 1 ........... |

    GemmScatter    compute | columns 0 of all | columns 1: peers | own  | sums
                   links   |                  | columns 0 ..... | columns 1 ... |

A rule has the sizes of an operation.  ``program`` compiles the
:class:`~commfuse_npu.plan.program.Program` of one rank; the docstring lists the work, the functions
that the operation provides.  ``unfused`` names the operation's buffers and computes the result.
The first dimension of all matrices is rows; a block is
the ``s`` rows of one rank in a matrix of ``n * s``.
"""

from __future__ import annotations

from commfuse_npu.plan.rules.blocks import (
    Blocks,
    BucketGather,
    BucketScatter,
    ExchangeBlocks,
    GatherUse,
    ProduceScatter,
)
from commfuse_npu.plan.rules.gemms import (
    ColumnBackward,
    GatherGemm,
    GemmScatter,
)
from commfuse_npu.plan.rules.pieces import Piece
from commfuse_npu.plan.rules.rule import RULES, Carrier, Rule, forget_programs

__all__ = [
    "RULES",
    "Blocks",
    "BucketGather",
    "BucketScatter",
    "Carrier",
    "ColumnBackward",
    "ExchangeBlocks",
    "GatherGemm",
    "GatherUse",
    "GemmScatter",
    "Piece",
    "ProduceScatter",
    "Rule",
    "forget_programs",
]
