"""Layers in chunks of the sequence, whose transfers flow behind the work of the next operator.

Operator by operator a row-parallel layer can hide its reduce-scatter behind its own GEMM alone,
which may be shorter than the wire.  Here a layer runs chunk by chunk: while one is scattered,
normed and gathered, others are multiplied; the backward is the mirror image, by itself::

    compute  | proj 1 | proj 2 | fc1, fc2 0 | fc1, fc2 1 | fc1, fc2 2 | qkv, attention, proj 0 | ...
    links    | scatter 0 | gather 0, scatter 1 | gather 1, scatter 2 | gather 2, scatter 0 | ...

:mod:`.transfers` has the two nodes of autograd per transfer, :mod:`.stage` the order of the chunks,
:mod:`.attention` causal attention chunk by chunk, :mod:`.stripes` which rows a rank has.
"""

from __future__ import annotations

from commfuse_npu.ops.flow.attention import CausalChunks
from commfuse_npu.ops.flow.stage import Part, Stage
from commfuse_npu.ops.flow.stripes import stripe, unstripe
from commfuse_npu.ops.flow.transfers import Arriving, Flow, Leaving

__all__ = ["Arriving", "CausalChunks", "Flow", "Leaving", "Part", "Stage", "stripe", "unstripe"]
