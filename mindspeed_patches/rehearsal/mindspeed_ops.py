"""MindSpeed's own operators, which it compiles against CANN on first use, in plain torch.

Its loader checks a table of loaded operators before it compiles.  This module adds the operators of
dense models and of experts to the table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from commfuse_npu.kernels.cpu import accumulate_weight_gradient

__all__ = ["GroupedMatmul", "groupmatmul_add_fp32", "install"]

Groups = torch.Tensor | Sequence[int]
Tensors = list[torch.Tensor]


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

    It refuses strided tensors, for which the extension would read freed memory.
    """
    for tensor in (grad_output, total_input, main_grad):
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"npu_matmul_add_fp32: a tensor of shape {tuple(tensor.shape)} has strides "
                f"{tensor.stride()}; make it contiguous"
            )
    accumulate_weight_gradient(main_grad, grad_output, total_input)


def groupmatmul_add_fp32(
    x: torch.Tensor, dy: torch.Tensor, groups: torch.Tensor, grad: torch.Tensor
) -> None:
    """Add ``x[group]^T @ dy[group]`` to the fp32 ``grad``, ``[G, I, O]`` in any shape, in place."""
    sizes = _sizes(groups, 0, len(x))
    into = grad.view(len(groups), x.shape[-1], dy.shape[-1])
    for total, rows, grads in zip(into, x.split(sizes), dy.split(sizes), strict=True):
        accumulate_weight_gradient(total, rows, grads)


class GroupedMatmul:
    """MindSpeed's extension ``grouped_matmul``, for rows ``[T, I]`` sorted by group.

    Weights are ``[G, I, O]``. Each tensor and each result is a list with one element.
    """

    @staticmethod
    def npu_gmm(
        x: Tensors, weight: Tensors, bias: Tensors, groups: Groups, group_type: int, kind: int
    ) -> Tensors:
        """``x[group] @ weight[group]`` for each group, ``[T, O]``.

        With ``group_type`` 2, for each group the product of columns of ``x``, ``[I, T]``, and rows
        of ``weight``, ``[T, O]``: ``[G, I, O]``.
        """
        if bias or group_type not in (0, 2):
            raise NotImplementedError(
                f"npu_gmm: group_type {group_type} or a bias is not emulated; use 0 or 2 without"
            )
        if group_type:
            sizes = _sizes(groups, kind, x[0].shape[1])
            pairs = zip(x[0].split(sizes, 1), weight[0].split(sizes), strict=True)
            return [torch.stack([columns @ rows for columns, rows in pairs])]
        pairs = zip(x[0].split(_sizes(groups, kind, len(x[0]))), weight[0], strict=True)
        return [torch.cat([rows @ of_group for rows, of_group in pairs])]

    @classmethod
    def npu_gmm_backward(
        cls, grad: Tensors, x: Tensors, weight: Tensors, groups: Groups, kind: int
    ) -> tuple[Tensors, Tensors, Tensors]:
        """The gradients of ``x`` and ``weight``; there is none of a bias."""
        wgrad = cls.npu_gmm([x[0].mT], grad, [], groups, 2, kind)
        return cls.npu_gmm_backward_fusion(grad, weight, groups, kind)[0], wgrad, []

    @classmethod
    def npu_gmm_backward_fusion(
        cls, grad: Tensors, weight: Tensors, groups: Groups, kind: int
    ) -> tuple[Tensors, Tensors, Tensors]:
        """The gradient of ``x``; that of the weight is added by :func:`groupmatmul_add_fp32`."""
        return cls.npu_gmm(grad, [weight[0].mT], [], groups, 0, kind), [], []


def _sizes(groups: Groups, kind: int, rows: int) -> list[int]:
    """Rows of each group, from the ends of groups (kind 0) or from their sizes (kind 1)."""
    numbers = torch.as_tensor(groups, dtype=torch.int64)
    sizes = numbers if kind else numbers.diff(prepend=numbers.new_zeros(1))
    if int(sizes.sum()) != rows:
        raise ValueError(
            f"grouped matmul: the groups end at [{int(sizes.sum())}], the tensor has {rows} rows; "
            "the rows behind would be uninitialized"
        )
    return list(sizes.tolist())


def install() -> None:
    """Fill the loader's table; MindSpeed must be importable, and torch_npu set up."""
    from mindspeed.op_builder.builder import AS_LIBRARY, MindSpeedOpBuilder

    # Its loader requires the path of ATB before it checks the table, and so does the feature.
    os.environ.setdefault("ATB_HOME_PATH", "emulated")
    functions = npu_rotary_position_embedding, npu_matmul_add_fp32
    modules = {f.__name__: SimpleNamespace(**{f.__name__: f}) for f in functions}
    MindSpeedOpBuilder._loaded_ops.update(
        **modules,
        npu_groupmatmul_add_fp32=SimpleNamespace(npu_groupmatmul_add_fp32=groupmatmul_add_fp32),
        grouped_matmul=GroupedMatmul,
        grouped_matmul_v2=GroupedMatmul,
    )
    from mindspeed.ops import gmm

    # The functions that it uses on a device, with an autograd function inside.
    AS_LIBRARY.impl("npu_gmm.Tensor", gmm._npu_gmm, "CPU")
    AS_LIBRARY.impl("npu_gmm.List", gmm._npu_gmm, "CPU")
    AS_LIBRARY.impl("npu_gmm_v2.Tensor", gmm._npu_gmm_v2, "CPU")
