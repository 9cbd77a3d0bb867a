"""Several GEMMs in one call, of a backend that has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["grouped_gemm"]


def grouped_gemm(
    inputs: torch.Tensor, weight: torch.Tensor, groups: int
) -> tuple[str, Callable[[], Sequence[torch.Tensor]]]:
    """``[part @ weight for part in inputs.chunk(groups)]`` in one call that takes any groups.

    Args:
        inputs: ``[m, k]``; ``groups`` divides m.
        weight: ``[k, n]``, of every group.

    Returns:
        The operator's name, and the call: torch_npu's for tensors that lie apart (read in the
        schema of 2.13.0, not run), elsewhere torch's for runs of rows of one.  What is missing, or
        does not take these, shows when it is called.
    """
    if inputs.device.type == "npu":
        parts, weights = list(inputs.chunk(groups)), [weight] * groups
        separate = -1  # of group_type: every group has tensors of its own
        return "npu_grouped_matmul", lambda: torch.ops.npu.npu_grouped_matmul(
            parts, weights, split_item=0, group_type=separate
        )
    rows = inputs.shape[0] // groups
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=inputs.device) * rows
    many = weight.expand(groups, *weight.shape)
    return "torch._grouped_mm", lambda: torch._grouped_mm(inputs, many, offs=ends).chunk(groups)
