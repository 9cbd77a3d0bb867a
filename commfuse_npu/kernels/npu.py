"""Kernels for Ascend NPUs: torch_npu's operators where they are faster than plain torch.

Not yet run on an NPU.  Names, types and result shapes of the operators were checked against the
schemas and meta kernels of torch_npu 2.13.0, and numbers against an emulation of the operators on
the CPU (``mindspeed_patches.rehearsal.npu_ops``).  What the operators do on a device was only read
in their documentation and in MindSpeed.

torch_npu is not imported here: an NPU tensor exists only after its import, which defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from commfuse_npu.kernels import cpu

# The same on every device: torch.mm writes into its result, and each addition is one kernel.
from commfuse_npu.kernels.cpu import AttentionPiece, gemm_into, sum_parts

__all__ = [
    "MatmulAdd",
    "accumulate_weight_gradient",
    "attention_backward",
    "attention_forward",
    "gemm_into",
    "sum_parts",
    "use_matmul_add",
]

MatmulAdd = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``f(total_input, grad_output, main_grad)``: ``main_grad += grad_output^T @ total_input``.

The argument order of Megatron's ``wgrad_gemm_accum_fp32`` and MindSpeed's ``npu_matmul_add_fp32``.
"""

_NO_MASK = 0
_BOTTOM_RIGHT = 3
"""Values of ``sparse_mode``: 0 without a mask hides nothing; 3 is causal, with the last query at
the last key, in each document if there are several.

Mode 2 is causal too, with the first query at the first key: wrong for every chunk but the first.
"""
_ALL_BEFORE = 2**31 - 1

_matmul_add: dict[str, MatmulAdd | None] = {"fp32": None, "sixteen_bits": None}


def use_matmul_add(*, fp32: MatmulAdd | None = None, sixteen_bits: MatmulAdd | None = None) -> None:
    """Set the functions that accumulate weight gradients; ``None`` resets to plain torch.

    torch_npu has no GEMM that adds the product of 16-bit factors to an fp32 sum.  MindSpeed has one
    (``npu_matmul_add_fp32``), but this package may not import MindSpeed, so a caller that may
    passes it here.

    Args:
        fp32: for an fp32 sum of bf16 factors.
        sixteen_bits: for a bf16 or fp16 sum.  MindSpeed's rounds the product before adding it;
            plain torch rounds only the sum.
    """
    _matmul_add.update(fp32=fp32, sixteen_bits=sixteen_bits)


def accumulate_weight_gradient(
    total: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor
) -> None:
    """``total += grad_output^T @ total_input``, with :func:`use_matmul_add`'s function if possible.

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


class _AttentionCall:
    """One call of the operators: its layout, and which keys a query sees.

    The layout is ``SBH``, queries ``[Sq, B, A * D]`` and keys ``[Sk, B, G * D]``.  For packed
    documents it is ``TND``, ``[T, A, D]``, the rows of sample 0 first; tensors are copied only if
    there are several samples.

    Attributes:
        settings: arguments of both operators.  ``next_tockens`` is how many keys after its own
            position a query sees, aligned at the ends; the lengths are cumulative.
    """

    def __init__(
        self, q: torch.Tensor, causal: bool, pieces: Sequence[AttentionPiece] | None
    ) -> None:
        self.settings: dict[str, Any] = {
            "head_num": q.shape[2],
            "input_layout": "SBH" if pieces is None else "TND",
            "keep_prob": 1.0,
            "atten_mask": _causal_mask(q.device) if causal else None,
            "pre_tockens": _ALL_BEFORE,
            "next_tockens": 0 if causal else _ALL_BEFORE,
            "sparse_mode": _BOTTOM_RIGHT if causal else _NO_MASK,
        }
        # For each sample of packed documents, the keys that any query sees.
        self._seen: list[slice] | None = None
        if pieces is not None:
            for name, runs in (
                ("actual_seq_qlen", [piece.queries for piece in pieces]),
                ("actual_seq_kvlen", [piece.keys for piece in pieces]),
            ):
                self.settings[name] = list(accumulate(run.stop - run.start for run in runs))
            first = {piece.sample: piece.keys.start for piece in reversed(pieces)}
            self._seen = [slice(first[sample], None) for sample in range(q.shape[1])]

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[Sq, B, A, D]`` in the layout."""
        return x.flatten(2) if self._seen is None else x.transpose(0, 1).flatten(0, 1)

    def like_queries(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`queries`: the shape of ``like``."""
        if self._seen is None:
            return x.view(like.shape)
        return x.unflatten(0, (like.shape[1], -1)).transpose(0, 1).contiguous()

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """``[Sk, B, G, D]`` in the layout."""
        if self._seen is None:
            return x.flatten(2)
        samples = [x[keys, sample] for sample, keys in enumerate(self._seen)]
        return samples[0] if len(samples) == 1 else torch.cat(samples)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``x``, in the layout of :meth:`keys`, to ``total`` ``[Sk, B, G, D]``."""
        if self._seen is None:
            total.add_(x.view(total.shape))
            return
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
    pieces: Sequence[AttentionPiece] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """See :func:`.cpu.attention_forward`; calls ``npu_fusion_attention``.

    The statistics are each row's maximum and sum of exponentials, fp32 ``[B, A, Sq, 8]`` (with
    pieces ``[B * Sq, A, 8]``), and a reserved output of the operator.
    """
    run = _AttentionCall(q, causal, pieces)
    out, maximum, total, reserved, *_ = torch.ops.npu.npu_fusion_attention(
        run.queries(q),
        run.keys(k),
        run.keys(v),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        **run.settings,
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
    pieces: Sequence[AttentionPiece] | None = None,
) -> torch.Tensor:
    """See :func:`.cpu.attention_backward`; calls ``npu_fusion_attention_grad``.

    The operator returns gradients in the dtype of ``q``, so the terms that each chunk adds to
    ``grad_k`` and ``grad_v`` are rounded to it before.
    """
    maximum, total, reserved = statistics
    run = _AttentionCall(q, causal, pieces)
    grad_q, new_k, new_v, *_ = torch.ops.npu.npu_fusion_attention_grad(
        run.queries(q),
        run.keys(k),
        run.keys(v),
        run.queries(grad),
        softmax_max=maximum,
        softmax_sum=total,
        softmax_in=reserved,
        attention_in=run.queries(out),
        scale_value=q.shape[-1] ** -0.5 if scale is None else scale,
        **run.settings,
    )
    run.add_to_keys(grad_k, new_k)
    run.add_to_keys(grad_v, new_v)
    return run.like_queries(grad_q, q)
