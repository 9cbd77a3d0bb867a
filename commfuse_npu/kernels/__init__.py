"""The device kernels of the fused operators: one module per kind of device.

:mod:`.cpu` is plain torch, runs on every device, and is the reference with the documentation of
each function.  :mod:`.npu` has the same functions, with operators of torch_npu where those are
faster.  :func:`kernels_for` returns the module of a device.
"""

from __future__ import annotations

from types import ModuleType

import torch

from commfuse_npu.kernels import cpu, npu
from commfuse_npu.kernels.cpu import AttentionPiece, gemm_into
from commfuse_npu.kernels.npu import MatmulAdd, use_matmul_add

__all__ = ["AttentionPiece", "MatmulAdd", "gemm_into", "kernels_for", "use_matmul_add"]


def kernels_for(device: torch.device) -> ModuleType:
    """The kernels of a device: :mod:`.npu` for ``npu``, :mod:`.cpu` for everything else."""
    return npu if device.type == "npu" else cpu
