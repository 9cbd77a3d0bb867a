"""MindSpeed's grouped GEMMs of experts in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_npu.kernels.cpu import accumulate_weight_gradient

__all__ = ["GroupedMatmul", "groupmatmul_add_fp32"]

Groups = torch.Tensor | Sequence[int]
Tensors = list[torch.Tensor]


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
        sizes = _sizes(groups, kind, len(x[0]))
        pairs = zip(x[0].split(sizes), weight[0], strict=True)
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


def groupmatmul_add_fp32(
    x: torch.Tensor, dy: torch.Tensor, groups: torch.Tensor, grad: torch.Tensor
) -> None:
    """Add ``x[group]^T @ dy[group]`` to the fp32 ``grad``, ``[G, I, O]`` in any shape, in place."""
    sizes = _sizes(groups, 0, len(x))
    into = grad.view(len(groups), x.shape[-1], dy.shape[-1])
    for total, rows, grads in zip(into, x.split(sizes), dy.split(sizes), strict=True):
        accumulate_weight_gradient(total, rows, grads)
