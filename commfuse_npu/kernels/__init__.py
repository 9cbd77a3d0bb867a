"""The few device kernels behind the fused operators: one module per kind of device.

:mod:`.cpu` is plain torch, runs everywhere, is the reference and says what each function does.
:mod:`.npu` has the same functions, by the operators of torch_npu where they do better.  An
operation asks :func:`kernels_for` once and keeps the answer.
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

The order of Megatron's ``wgrad_gemm_accum_fp32`` and of MindSpeed's ``npu_matmul_add_fp32``.
"""


def kernels_for(device: torch.device) -> ModuleType:
    """The kernels of a device: :mod:`.npu` for ``npu``, :mod:`.cpu` for everything else."""
    return _npu() if device.type == "npu" else cpu


@cache
def _npu() -> ModuleType:
    # Only when asked for: on a CPU it is of no use.
    from commfuse_npu.kernels import npu

    return npu


def gemm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """:func:`.cpu.gemm_into` of the device of ``out``."""
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
