"""Kernels in plain torch.  They run on every device and are the reference of any faster one."""

from __future__ import annotations

import torch

__all__ = ["accumulate_weight_gradient", "gemm_into"]


def gemm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = a @ b`` without a temporary: ``[m, k] @ [k, n] -> [m, n]``."""
    torch.mm(a, b, out=out)


def accumulate_weight_gradient(
    total: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor
) -> None:
    """``total += grad_output^T @ total_input``, product and sum in fp32, rounded once.

    Args:
        total: ``[O, I]``, fp32, bf16 or fp16.
        grad_output: ``[S, O]``.
        total_input: ``[S, I]``, the dtype of ``grad_output``.
    """
    transposed = grad_output.t().float()
    if total.dtype == torch.float32:
        total.addmm_(transposed, total_input.float())
    else:
        total.copy_(torch.addmm(total.float(), transposed, total_input.float()))
