"""The few device kernels behind the fused operators: one interface, one module per kind of device.

:mod:`.cpu` is plain torch, runs everywhere and is the reference.  :mod:`.npu` calls the operators
of torch_npu where they do better.  Both are modules whose functions are those of :class:`Kernels`;
an operation asks :func:`kernels_for` once and keeps the answer.

Legend: ``S`` rows of the sequence, ``B`` batch, ``A`` query heads, ``G`` key heads (``A`` is a
multiple of ``G``; query head ``a`` uses key head ``a // (A / G)``), ``D`` features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.kernels.attention_arguments import Piece

__all__ = ["Kernels", "MatmulAdd", "Piece", "gemm_into", "kernels_for", "use_matmul_add"]

MatmulAdd = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``f(total_input, grad_output, main_grad)``: ``main_grad += grad_output^T @ total_input``.

The order of Megatron's ``wgrad_gemm_accum_fp32`` and of MindSpeed's ``npu_matmul_add_fp32``.
"""


class Kernels(Protocol):
    """What a device has to be able to do."""

    def gemm_into(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """``out = a @ b`` without a temporary: ``[m, k] @ [k, n] -> [m, n]``.

        Args:
            out: may be a run of rows of a larger tensor.
            a, b: one dtype, that of ``out``.
        """

    def sum_parts(
        self,
        out: torch.Tensor,
        terms: Sequence[tuple[torch.Tensor, int]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add partial sums, in the order given, and round the result into ``out``.

        Equals, with ``parts`` those of all terms::

            total = parts[0]
            for part in parts[1:]:
                total = total + part            # rounded to the dtype of out
            out.copy_(total)

        With a ``dtype`` the additions are made in it and only the result is rounded.

        Args:
            out: ``[s, columns]``; may be some columns of a wider matrix, or the first term.
            terms: ``(tensor, k)``: a stack of k parts ``[k * s, columns]``, contiguous for k > 1.
                The first one may be overwritten.
        """

    def accumulate_weight_gradient(
        self, total: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor
    ) -> None:
        """``total += grad_output^T @ total_input``.

        Args:
            total: ``[O, I]``, fp32, bf16 or fp16, changed in place.
            grad_output: ``[S, O]``.
            total_input: ``[S, I]``, the dtype of ``grad_output``.
        """

    def attention_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        pieces: Sequence[Piece] | None = None,
        hidden: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Attention of a chunk of queries against all the keys it may see.

        Equals, with the key heads repeated to ``A``::

            scores = q @ k^T * scale
            if causal:
                scores[i, j] = -inf where j > i + (Sk - Sq)
            if hidden:
                scores[i, j] = -inf where hidden[i, j]
            out = softmax(scores) @ v                   # zero for a query that sees nothing

        and with pieces, per piece::

            out[queries, sample] = causal attention(q[queries, sample], k[keys, sample], ...)

        So ``q[q0:q1]`` against ``k[:q1], v[:q1]`` gives the rows ``q0:q1`` of causal attention: the
        last query sees the last key.

        Args:
            q: ``[Sq, B, A, D]``.  Runs of rows of a contiguous tensor are not copied.
            k, v: ``[Sk, B, G, D]``, the dtype of ``q``.
            causal: needs ``Sq <= Sk``.
            scale: ``D ** -0.5`` by default.
            pieces: of packed documents, instead of ``hidden``, and only if causal.  All queries of
                sample 0, one piece after the other, then those of the next; and the keys of a
                sample from those of its first piece to the last, without a gap.
            hidden: bool, ``[B, 1, Sq, Sk]`` or ``[1, 1, Sq, Sk]``, True where a query does not see
                a key.

        Returns:
            The output like ``q``, and tensors with the statistics of the softmax, which
            :meth:`attention_backward` of the same kernels takes: what is in them is the device's
            affair.

        Raises:
            ValueError: shapes or dtypes do not fit each other.
        """

    def attention_backward(
        self,
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
        """The gradients of q, k and v for one call of :meth:`attention_forward`.

        Args:
            grad: the gradient of ``out``, ``[Sq, B, A, D]``.
            out, statistics: what the forward returned.
            grad_k, grad_v: ``[Sk, B, G, D]``.  The gradients of this chunk of queries are added
                to them; with fp32, the sum over chunks is rounded only by who reads it.

        Returns:
            The gradient of q.

        Raises:
            ValueError: see :meth:`attention_forward`.
        """


def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device: :mod:`.npu` for ``npu``, :mod:`.cpu` for everything else."""
    return _npu() if device.type == "npu" else cpu


@cache
def _npu() -> Kernels:
    # Only when asked for: on a CPU it is of no use.
    from commfuse_npu.kernels import npu

    return npu


def gemm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """:meth:`Kernels.gemm_into` of the device of ``out``."""
    kernels_for(out.device).gemm_into(out, a, b)


def use_matmul_add(*, fp32: MatmulAdd | None = None, sixteen_bits: MatmulAdd | None = None) -> None:
    """Let weight gradients on NPUs be accumulated by functions from outside.

    torch_npu has no GEMM that adds the product of 16-bit factors to an fp32 sum; MindSpeed has
    (``mindspeed.ops.npu_matmul_add``), which this package may not import.  Who may, hands it in.

    Args:
        fp32: for an fp32 sum of bf16 factors.
        sixteen_bits: for a bf16 or fp16 sum.  MindSpeed's rounds the product before it adds it;
            without one the sum is rounded once.

    What is ``None`` is plain torch again.
    """
    from commfuse_npu.kernels import npu

    npu.set_matmul_add(fp32, sixteen_bits)
