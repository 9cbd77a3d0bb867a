"""Kernels for Ascend NPUs: torch_npu's operators where they are faster than plain torch.

Not yet run on an NPU.  Names, types and result shapes of the operators were checked against the
schemas and meta kernels of torch_npu 2.13.0, and numbers against an emulation of the operators on
the CPU (``mindspeed_patches.rehearsal.npu_ops``).  What the operators do on a device was only read
in their documentation and in MindSpeed.

torch_npu is not imported here: an NPU tensor exists only after its import, which defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from commfuse_npu.kernels import cpu

# The same on every device: torch.mm writes into its result, and each addition is one kernel.
from commfuse_npu.kernels.cpu import Piece, gemm_into, sum_parts

if TYPE_CHECKING:
    from commfuse_npu.kernels import MatmulAdd

__all__ = [
    "accumulate_weight_gradient",
    "attention_backward",
    "attention_forward",
    "gemm_into",
    "set_matmul_add",
    "sum_parts",
]

_NO_MASK, _BOTTOM_RIGHT = 0, 3
"""Values of ``sparse_mode``: 0 without a mask hides nothing; 3 is causal, with the last query at
the last key, in each document if there are several.

Mode 2 is causal too, with the first query at the first key: wrong for every chunk but the first.
"""
_ALL_BEFORE = 2**31 - 1

_matmul_add: dict[str, MatmulAdd | None] = {"fp32": None, "sixteen_bits": None}


def set_matmul_add(fp32: MatmulAdd | None, sixteen_bits: MatmulAdd | None) -> None:
    """See :func:`commfuse_npu.kernels.use_matmul_add`."""
    _matmul_add.update(fp32=fp32, sixteen_bits=sixteen_bits)


def accumulate_weight_gradient(
    total: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor
) -> None:
    """``total += grad_output^T @ total_input``, with :func:`set_matmul_add`'s function if possible.

    For an fp32 sum MindSpeed's function takes only bf16 factors: the ATB operation that it calls
    takes no fp32 ones, and does not transpose fp16 ones [read in ATB's documentation, CANN 8.3].
    Other factors use plain torch, which casts them to fp32: correct, but slower than a 16-bit GEMM.

    MindSpeed copies a strided operand to a temporary and keeps only its address, so the GEMM would
    read freed memory [read in ``ParamSetter::Input`` of its ``atb_adapter.cpp``, 26.1.0].  So
    strided factors are copied here, and a strided sum, which has to be written, uses plain torch.
    """
    function = None
    if total.dtype != torch.float32:
        function = _matmul_add["sixteen_bits"]
    elif grad_output.dtype == torch.bfloat16:
        function = _matmul_add["fp32"]
    if function is None or not total.is_contiguous():
        cpu.accumulate_weight_gradient(total, grad_output, total_input)
    else:
        function(total_input.contiguous(), grad_output.contiguous(), total)


@cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """The triangle mask that the compressed sparse modes need for every length; True is hidden.

    Without it the operator computes full attention and reports no error.
    """
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


def _masking(device: torch.device, causal: bool) -> dict[str, Any]:
    """The arguments of both operators that say which keys a query sees.

    ``next_tockens`` is how many keys after its own position a query sees, aligned at the ends.
    """
    return {
        "atten_mask": _causal_mask(device) if causal else None,
        "pre_tockens": _ALL_BEFORE,
        "next_tockens": 0 if causal else _ALL_BEFORE,
        "sparse_mode": _BOTTOM_RIGHT if causal else _NO_MASK,
    }


class WholeRun:
    """The operators' layout ``SBH``: queries ``[Sq, B, A * D]`` and keys ``[Sk, B, G * D]``.

    Attributes:
        query_ends, key_ends: cumulative lengths, ``actual_seq_qlen`` and ``actual_seq_kvlen``.
    """

    layout = "SBH"
    query_ends: list[int] | None = None
    key_ends: list[int] | None = None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[Sq, B, A, D]`` in the layout."""
        return x.flatten(2)

    def like_queries(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`queries`: the shape of ``like``."""
        return x.view(like.shape)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """``[Sk, B, G, D]`` in the layout."""
        return x.flatten(2)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``x``, in the layout of :meth:`keys`, to ``total`` ``[Sk, B, G, D]``."""
        total.add_(x.view(total.shape))


class PackedRun(WholeRun):
    """The layout ``TND`` for packed documents: ``[T, A, D]``, the rows of sample 0 first.

    Tensors are copied only if there are several samples.
    """

    layout = "TND"

    def __init__(self, pieces: Sequence[Piece], batch: int) -> None:
        self.query_ends = list(
            accumulate(piece.queries.stop - piece.queries.start for piece in pieces)
        )
        self.key_ends = list(accumulate(piece.keys.stop - piece.keys.start for piece in pieces))
        first: dict[int, int] = {}
        for piece in pieces:
            first.setdefault(piece.sample, piece.keys.start)
        # For each sample, the keys that any query sees.
        self._seen = [slice(first[sample], None) for sample in range(batch)]

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).flatten(0, 1)

    def like_queries(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (like.shape[1], -1)).transpose(0, 1).contiguous()

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        samples = [x[keys, sample] for sample, keys in enumerate(self._seen)]
        return samples[0] if len(samples) == 1 else torch.cat(samples)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        samples = [total[keys, sample] for sample, keys in enumerate(self._seen)]
        for rows, part in zip(samples, x.split([len(rows) for rows in samples]), strict=True):
            rows.add_(part)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    pieces: Sequence[Piece] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """See :func:`.cpu.attention_forward`; calls ``npu_fusion_attention``.

    The statistics are each row's maximum and sum of exponentials, fp32 ``[B, A, Sq, 8]`` (with
    pieces ``[B * Sq, A, 8]``), and a reserved output of the operator.
    """
    run = WholeRun() if pieces is None else PackedRun(pieces, q.shape[1])
    out, maximum, total, reserved, *_ = torch.ops.npu.npu_fusion_attention(
        run.queries(q),
        run.keys(k),
        run.keys(v),
        q.shape[2],
        run.layout,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        keep_prob=1.0,
        actual_seq_qlen=run.query_ends,
        actual_seq_kvlen=run.key_ends,
        **_masking(q.device, causal),
    )
    return run.like_queries(out, q), (maximum, total, reserved)


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    pieces: Sequence[Piece] | None = None,
) -> torch.Tensor:
    """See :func:`.cpu.attention_backward`; calls ``npu_fusion_attention_grad``.

    The operator returns gradients in the dtype of ``q``, so the terms that each chunk adds to
    ``grad_k`` and ``grad_v`` are rounded to it before.
    """
    maximum, total, reserved = statistics
    run = WholeRun() if pieces is None else PackedRun(pieces, q.shape[1])
    grad_q, new_k, new_v, *_ = torch.ops.npu.npu_fusion_attention_grad(
        run.queries(q),
        run.keys(k),
        run.keys(v),
        run.queries(grad),
        q.shape[2],
        run.layout,
        softmax_max=maximum,
        softmax_sum=total,
        softmax_in=reserved,
        attention_in=run.queries(out),
        scale_value=q.shape[-1] ** -0.5 if scale is None else scale,
        keep_prob=1.0,
        actual_seq_qlen=run.query_ends,
        actual_seq_kvlen=run.key_ends,
        **_masking(q.device, causal),
    )
    run.add_to_keys(grad_k, new_k)
    run.add_to_keys(grad_v, new_v)
    return run.like_queries(grad_q, q)
