"""MindSpeed's own operators, which it compiles against CANN on first use.

Its loader checks a table of loaded operators before it compiles.  This module adds the operators of
dense models and of experts to the table, in plain torch.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch

from commfuse_npu.kernels.cpu import accumulate_weight_gradient
from mindspeed_patches.rehearsal.expert_ops import GroupedMatmul, groupmatmul_add_fp32

__all__ = ["install"]


def npu_rotary_position_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0
) -> torch.Tensor:
    """Rotate pairs: halves of the last dimension (mode 0), or neighbors in it (mode 1)."""
    import torch_npu

    rotated: torch.Tensor = torch_npu.npu_rotary_mul(x, cos, sin, ("half", "interleave")[mode])
    return rotated


def npu_matmul_add_fp32(
    grad_output: torch.Tensor, total_input: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Our weight-gradient kernel, which the fused layers use too, with the extension's arguments.

    Raises:
        RuntimeError: a tensor is strided, for which the extension would read freed memory.
    """
    for tensor in (grad_output, total_input, main_grad):
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"npu_matmul_add_fp32: a tensor of shape {tuple(tensor.shape)} has strides "
                f"{tensor.stride()}; make it contiguous"
            )
    accumulate_weight_gradient(main_grad, grad_output, total_input)


def install() -> None:
    """Fill the loader's table; MindSpeed must be importable, and torch_npu set up."""
    from mindspeed.op_builder.builder import AS_LIBRARY, MindSpeedOpBuilder

    # Its loader requires the path of ATB before it checks the table, and so does the feature.
    os.environ.setdefault("ATB_HOME_PATH", "emulated")
    MindSpeedOpBuilder._loaded_ops.update(
        npu_rotary_position_embedding=SimpleNamespace(
            npu_rotary_position_embedding=npu_rotary_position_embedding
        ),
        npu_matmul_add_fp32=SimpleNamespace(npu_matmul_add_fp32=npu_matmul_add_fp32),
        npu_groupmatmul_add_fp32=SimpleNamespace(npu_groupmatmul_add_fp32=groupmatmul_add_fp32),
        grouped_matmul=GroupedMatmul,
        grouped_matmul_v2=GroupedMatmul,
    )
    from mindspeed.ops import gmm

    # The functions that it uses on a device, with an autograd function inside.
    AS_LIBRARY.impl("npu_gmm.Tensor", gmm._npu_gmm, "CPU")
    AS_LIBRARY.impl("npu_gmm.List", gmm._npu_gmm, "CPU")
    AS_LIBRARY.impl("npu_gmm_v2.Tensor", gmm._npu_gmm_v2, "CPU")
