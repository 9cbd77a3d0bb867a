"""The GEMMs of a linear layer whose weight is there block by block.

Legend: as in :mod:`commfuse_npu.ops.sharded_linear`; a block is the rows ``run`` of ``W_OI``.
"""

from __future__ import annotations

import torch

from commfuse_npu.kernels import gemm_into, kernels_for

__all__ = ["InputGradient", "columns_into", "wgrad_into"]


def columns_into(
    y: torch.Tensor, x: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None, run: slice
) -> None:
    """``y[:, run] = x @ block^T + bias[run]``.

    BLAS writes a run of columns as it writes a matrix, in the same time and with the same bits
    (measured on CPU in fp32 and bf16; not tried on an NPU).  A block of its own, or ``y^T``, would
    cost a copy of y.
    """
    gemm_into(y[:, run], x, block.t())
    if bias is not None:
        y[:, run].add_(bias[run])


def wgrad_into(out: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, run: slice) -> None:
    """``out = grad[:, run]^T @ x``."""
    gemm_into(out, grad[:, run].t(), x)


class InputGradient:
    """``sum over blocks of grad[:, run] @ block``, in fp32, rounded once."""

    def __init__(self, grad: torch.Tensor, features: int) -> None:
        self._grad = grad
        self._kernels = kernels_for(grad.device)
        self._sum = grad.new_zeros((grad.shape[0], features), dtype=torch.float32)

    def add(self, block: torch.Tensor, run: slice) -> None:
        # sum += a @ b is the kernel of the weight gradient with a transposed.
        self._kernels.accumulate_weight_gradient(self._sum, self._grad[:, run].t(), block)

    def result(self) -> torch.Tensor:
        return self._sum.to(self._grad.dtype)
