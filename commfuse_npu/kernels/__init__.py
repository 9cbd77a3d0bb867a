"""The device kernels of the fused operators: one module per kind of device.

:mod:`.cpu` is plain torch, runs on every device, and is the reference with the documentation of
each function.  :mod:`.npu` has the same functions, with operators of torch_npu where those are
faster.  :func:`kernels_for` returns the module of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.kernels.cpu import Piece

__all__ = ["MatmulAdd", "Piece", "gemm_into", "kernels_for", "use_matmul_add"]

MatmulAdd = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``f(total_input, grad_output, main_grad)``: ``main_grad += grad_output^T @ total_input``.

The argument order of Megatron's ``wgrad_gemm_accum_fp32`` and MindSpeed's ``npu_matmul_add_fp32``.
"""


def kernels_for(device: torch.device) -> ModuleType:
    """The kernels of a device: :mod:`.npu` for ``npu``, :mod:`.cpu` for everything else."""
    return _npu() if device.type == "npu" else cpu


@cache
def _npu() -> ModuleType:
    # Imported on demand: not needed on a CPU.
    from commfuse_npu.kernels import npu

    return npu


def gemm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``gemm_into`` of the kernels of ``out``'s device; see :func:`.cpu.gemm_into`."""
    kernels_for(out.device).gemm_into(out, a, b)


def use_matmul_add(*, fp32: MatmulAdd | None = None, sixteen_bits: MatmulAdd | None = None) -> None:
    """Set the functions that accumulate weight gradients on NPUs; ``None`` resets to plain torch.

    torch_npu has no GEMM that adds the product of 16-bit factors to an fp32 sum.  MindSpeed has one
    (``mindspeed.ops.npu_matmul_add``), but this package may not import MindSpeed, so a caller that
    may passes it here.

    Args:
        fp32: for an fp32 sum of bf16 factors.
        sixteen_bits: for a bf16 or fp16 sum.  MindSpeed's rounds the product before adding it;
            plain torch rounds only the sum.
    """
    from commfuse_npu.kernels import npu

    npu.set_matmul_add(fp32, sixteen_bits)
