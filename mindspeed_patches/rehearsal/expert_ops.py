"""Expert operators in plain torch: grouped GEMMs, and permutation of tokens by expert and back.

Tokens are sorted by expert, then by token number; ``sorted_indices`` are the numbers in that order,
as in Megatron's own ``permute``. On a device they may differ: only the operators read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_npu.kernels.cpu import accumulate_weight_gradient

__all__ = ["EXPERT_KERNELS", "GroupedMatmul", "groupmatmul_add_fp32"]

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


def _chosen(routing_map: torch.Tensor, drop_and_pad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the tokens and of their experts, sorted by expert."""
    if drop_and_pad:
        raise NotImplementedError("token permutation: drop_and_pad is not emulated; leave it out")
    experts, tokens = routing_map.bool().T.nonzero().unbind(1)
    return tokens, experts


def _summed(rows: torch.Tensor, indices: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sum of the rows of each token in fp32, rounded once."""
    total = rows.new_zeros((tokens, rows.shape[-1]), dtype=torch.float32)
    return total.index_add_(0, indices, rows.float()).to(rows.dtype)


def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens ``[T, H]`` once per expert, sorted by expert; their probabilities; their numbers."""
    chosen = _chosen(routing_map, drop_and_pad)
    weights = tokens.new_empty(0) if probs is None else probs[chosen]
    return tokens[chosen[0]], weights, chosen[0]


def permute_grad(
    grad: torch.Tensor,
    probs_grad: torch.Tensor | None,
    sorted_indices: torch.Tensor,
    routing_map: torch.Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the tokens and of the probabilities ``[T, experts_num]``."""
    chosen = _chosen(routing_map, drop_and_pad)
    of_probs = grad.new_empty(0)
    if probs_grad is not None and probs_grad.numel():
        of_probs = probs_grad.new_zeros(tokens_num, experts_num).index_put_(chosen, probs_grad)
    return _summed(grad, sorted_indices, tokens_num), of_probs


def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted sums of the experts' outputs per token, and three tensors for the backward."""
    weights = permuted_tokens.new_empty(0)
    if probs is not None and routing_map is not None:
        weights = probs[_chosen(routing_map, drop_and_pad)]
        permuted_tokens = (permuted_tokens * weights.unsqueeze(-1)).to(permuted_tokens.dtype)
    out = _summed(permuted_tokens, sorted_indices, restore_shape[0])
    return out, sorted_indices.clone(), sorted_indices.clone(), weights


def unpermute_grad(
    grad: torch.Tensor,
    out_index: torch.Tensor,
    permuted_token_id: torch.Tensor,
    routing_map: torch.Tensor | None,
    permuted_tokens: torch.Tensor | None,
    probs: torch.Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the experts' outputs and of the probabilities."""
    grad = grad[permuted_token_id]
    if probs is None or routing_map is None or permuted_tokens is None:
        return grad, grad.new_empty(0)
    chosen = _chosen(routing_map, drop_and_pad)
    of_probs = (grad.float() * permuted_tokens.float()).sum(-1).to(probs.dtype)
    weighted = (grad * probs[chosen].unsqueeze(-1)).to(grad.dtype)
    return weighted, torch.zeros_like(probs).index_put_(chosen, of_probs)


EXPERT_KERNELS: dict[str, Callable[..., Any]] = {
    "npu_moe_token_permute_with_routing_map": permute,
    "npu_moe_token_permute_with_routing_map_grad": permute_grad,
    "_npu_moe_token_unpermute_with_routing_map": unpermute,
    "npu_moe_token_unpermute_with_routing_map_grad": unpermute_grad,
}
"""Kernels by the names of torch_npu's operators, which not all versions have."""
