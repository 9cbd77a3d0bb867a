"""Kernels for Ascend NPUs: torch_npu's operators where they do better than plain torch.

Nothing here has run on an NPU.  Names, types and result shapes of the operators were checked
against torch_npu 2.13.0's own schemas and meta kernels, the numbers against an emulation of the
operators on the CPU (``mindspeed_patches.rehearsal.npu_ops``); what the operators do on a device
was only read in their documentation and in MindSpeed.

torch_npu is not imported: it defined the operators before anyone could have a tensor of an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from commfuse_npu.kernels import cpu

# Some are the same on every device: torch.mm writes into its result, additions are a kernel each.
from commfuse_npu.kernels.cpu import (
    Piece,
    check_attention,
    gemm_into,
    sum_parts,
)

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

_AS_GIVEN, _BOTTOM_RIGHT = 0, 3
"""Values of ``sparse_mode``: the mask as given, or none; causal, the last query at the last key, of
each document if there are several.

Mode 2 is causal too, but from the first query and key on: wrong for every chunk but the first.
"""
_ALL_BEFORE = 2**31 - 1

_matmul_add: dict[str, MatmulAdd | None] = {"fp32": None, "sixteen_bits": None}


def set_matmul_add(fp32: MatmulAdd | None, sixteen_bits: MatmulAdd | None) -> None:
    """See :func:`commfuse_npu.kernels.use_matmul_add`."""
    _matmul_add.update(fp32=fp32, sixteen_bits=sixteen_bits)


def accumulate_weight_gradient(
    total: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor
) -> None:
    """``total += grad_output^T @ total_input``, by what :func:`set_matmul_add` got if it can.

    An fp32 sum by MindSpeed's function is for bf16 factors only: the ATB operation underneath takes
    no fp32 ones, and does not transpose fp16 ones [read in ATB's documentation, CANN 8.3].  Others
    take plain torch, which casts them to fp32 first: right, but slower than a 16-bit GEMM.

    MindSpeed copies a strided operand to a temporary and keeps only its address, so the GEMM would
    read freed memory [read in ``ParamSetter::Input`` of its ``atb_adapter.cpp``, 26.1.0].  Factors
    are therefore copied here; a strided sum, which a copy would not change, takes plain torch.
    """
    given = None
    if total.dtype != torch.float32:
        given = _matmul_add["sixteen_bits"]
    elif grad_output.dtype == torch.bfloat16:
        given = _matmul_add["fp32"]
    if given is None or not total.is_contiguous():
        cpu.accumulate_weight_gradient(total, grad_output, total_input)
    else:
        given(total_input.contiguous(), grad_output.contiguous(), total)


@cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """The triangle that the compressed sparse modes take for every length, True where hidden.

    Without it the operator computes full attention, and says nothing.
    """
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


class _Masking(NamedTuple):
    """Which keys a query sees, as both operators are told."""

    mask: torch.Tensor | None
    mode: int
    after: int
    """How far behind a query the last key is that it sees, both counted from the last."""


def _masking(device: torch.device, causal: bool, hidden: torch.Tensor | None) -> _Masking:
    if hidden is not None:
        if causal:  # in the mask, whose rows are a part of a whole one and copied anyway
            queries, keys = hidden.shape[2:]
            later = torch.ones(queries, keys, dtype=torch.bool, device=hidden.device)
            hidden = hidden | later.triu_(keys - queries + 1)
        return _Masking(hidden.contiguous(), _AS_GIVEN, _ALL_BEFORE)
    if causal:
        return _Masking(_causal_mask(device), _BOTTOM_RIGHT, 0)
    return _Masking(None, _AS_GIVEN, _ALL_BEFORE)


class WholeRun:
    """Queries ``[Sq, B, A * D]`` and keys ``[Sk, B, G * D]``, as the operators take them.

    Attributes:
        query_ends, key_ends: cumulative lengths, ``actual_seq_qlen`` and ``actual_seq_kvlen``.
    """

    layout = "SBH"
    query_ends: list[int] | None = None
    key_ends: list[int] | None = None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``[Sq, B, A, D]``."""
        return x.flatten(2)

    def like_queries(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`queries`, of the shape of ``like``."""
        return x.view(like.shape)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``[Sk, B, G, D]``."""
        return x.flatten(2)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add to ``total`` ``[Sk, B, G, D]`` what belongs to :meth:`keys` of it."""
        total.add_(x.view(total.shape))


class PackedRun(WholeRun):
    """Queries and keys ``[T, A, D]`` of packed documents, those of sample 0 first.

    Only documents of several samples are copied.
    """

    layout = "TND"

    def __init__(self, pieces: Sequence[Piece], batch: int) -> None:
        self.query_ends = list(accumulate(of.queries.stop - of.queries.start for of in pieces))
        self.key_ends = list(accumulate(of.keys.stop - of.keys.start for of in pieces))
        first: dict[int, int] = {}
        for piece in pieces:
            first.setdefault(piece.sample, piece.keys.start)
        # The keys of a sample that any query sees.
        self._seen = [slice(first[sample], None) for sample in range(batch)]

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).flatten(0, 1)

    def like_queries(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (like.shape[1], -1)).transpose(0, 1).contiguous()

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        samples = [x[seen, sample] for sample, seen in enumerate(self._seen)]
        return samples[0] if len(samples) == 1 else torch.cat(samples)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        samples = [total[seen, sample] for sample, seen in enumerate(self._seen)]
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
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """See :func:`.cpu.attention_forward`; ``npu_fusion_attention``.

    The statistics are each row's maximum and sum of exponentials, fp32 ``[B, A, Sq, 8]``, with
    pieces ``[B * Sq, A, 8]``, and what the operator reserves.

    What a device gives for a query that sees nothing was not found in the operator's documentation,
    and MindSpeed asks for it in the same way; the emulation gives zeros.
    """
    check_attention(q, k, v, causal=causal, hidden=hidden)
    run = WholeRun() if pieces is None else PackedRun(pieces, q.shape[1])
    masking = _masking(q.device, causal, hidden)
    out, maximum, total, reserved, *_ = torch.ops.npu.npu_fusion_attention(
        run.queries(q),
        run.keys(k),
        run.keys(v),
        q.shape[2],
        run.layout,
        atten_mask=masking.mask,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        keep_prob=1.0,
        pre_tockens=_ALL_BEFORE,
        next_tockens=masking.after,
        actual_seq_qlen=run.query_ends,
        actual_seq_kvlen=run.key_ends,
        sparse_mode=masking.mode,
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
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`.cpu.attention_backward`; ``npu_fusion_attention_grad``.

    The operator returns its gradients in the dtype of ``q``, so that each chunk's part of
    ``grad_k`` and ``grad_v`` is rounded to it before it is added.
    """
    check_attention(q, k, v, causal=causal, hidden=hidden, sums=(grad_k, grad_v))
    maximum, total, reserved = statistics
    run = WholeRun() if pieces is None else PackedRun(pieces, q.shape[1])
    masking = _masking(q.device, causal, hidden)
    grad_q, new_k, new_v, *_ = torch.ops.npu.npu_fusion_attention_grad(
        run.queries(q),
        run.keys(k),
        run.keys(v),
        run.queries(grad),
        q.shape[2],
        run.layout,
        atten_mask=masking.mask,
        softmax_max=maximum,
        softmax_sum=total,
        softmax_in=reserved,
        attention_in=run.queries(out),
        scale_value=q.shape[-1] ** -0.5 if scale is None else scale,
        keep_prob=1.0,
        pre_tockens=_ALL_BEFORE,
        next_tockens=masking.after,
        actual_seq_qlen=run.query_ends,
        actual_seq_kvlen=run.key_ends,
        sparse_mode=masking.mode,
    )
    run.add_to_keys(grad_k, new_k)
    run.add_to_keys(grad_v, new_v)
    return run.like_queries(grad_q, q)
