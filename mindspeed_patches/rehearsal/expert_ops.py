"""Operators of experts in plain torch: grouped GEMMs, and tokens sorted by expert and back.

Tokens are sorted by expert, then by number; ``sorted_indices`` are their numbers in that order, as
in Megatron's own ``permute``. On a device they may be something else: only the operators read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from commfuse_npu.kernels.cpu import accumulate_weight_gradient

__all__ = ["EXPERT_KERNELS", "GroupedMatmul", "groupmatmul_add_fp32"]

Groups = torch.Tensor | Sequence[int]


def _slices(groups: Groups, kind: int, rows: int) -> list[slice]:
    """Rows of each group, from where groups end (kind 0) or from how many rows they have (1)."""
    numbers = torch.as_tensor(groups, dtype=torch.int64)
    ends: list[int] = (numbers if kind == 0 else numbers.cumsum(0)).tolist()
    if not ends or ends[-1] != rows:
        raise ValueError(
            f"grouped matmul: the groups end at {ends[-1:]}, the tensor has {rows} rows; what is "
            "behind would be left as it is in memory"
        )
    return [slice(*part) for part in pairwise([0, *ends])]


class GroupedMatmul:
    """MindSpeed's extension ``grouped_matmul``, for rows ``[T, I]`` sorted by group.

    Weights are ``[G, I, O]``. Each tensor and each result comes as a list of one.
    """

    @staticmethod
    def npu_gmm(
        x: list[torch.Tensor],
        weight: list[torch.Tensor],
        bias: list[torch.Tensor],
        group_list: Groups,
        group_type: int,
        group_list_type: int,
    ) -> list[torch.Tensor]:
        """``x[group] @ weight[group]`` for each group, ``[T, O]``.

        Of ``group_type`` 2 the product of columns of ``x``, ``[I, T]``, and rows of ``weight``,
        ``[T, O]``, for each group, ``[G, I, O]``.
        """
        if bias or group_type not in (0, 2):
            raise NotImplementedError(
                f"npu_gmm: group_type {group_type} or a bias is not emulated; use 0 or 2 without"
            )
        tokens = x[0].shape[-1] if group_type else len(x[0])
        parts = _slices(group_list, group_list_type, tokens)
        if group_type:
            return [torch.stack([x[0][:, part] @ weight[0][part] for part in parts])]
        return [torch.cat([x[0][part] @ w for part, w in zip(parts, weight[0], strict=True)])]

    @classmethod
    def npu_gmm_backward(
        cls,
        grad: list[torch.Tensor],
        x: list[torch.Tensor],
        weight: list[torch.Tensor],
        group_list: Groups,
        group_list_type: int,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """The gradients of ``x`` and ``weight``, and none of a bias."""
        wgrad = cls.npu_gmm([x[0].mT], grad, [], group_list, 2, group_list_type)
        return cls.npu_gmm_backward_fusion(grad, weight, group_list, group_list_type)[0], wgrad, []

    @classmethod
    def npu_gmm_backward_fusion(
        cls,
        grad: list[torch.Tensor],
        weight: list[torch.Tensor],
        group_list: Groups,
        group_list_type: int,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """The gradient of ``x``; that of the weight is added by :func:`groupmatmul_add_fp32`."""
        turned = [one.mT for one in weight]
        return cls.npu_gmm(grad, turned, [], group_list, 0, group_list_type), [], []


def groupmatmul_add_fp32(
    x: torch.Tensor, dy: torch.Tensor, group_list: torch.Tensor, grad: torch.Tensor
) -> None:
    """Add ``x[group]^T @ dy[group]`` to the fp32 ``grad``, ``[G, I, O]`` in any shape, in place."""
    into = grad.view(len(group_list), x.shape[-1], dy.shape[-1])
    for part, one in zip(_slices(group_list, 0, len(x)), into, strict=True):
        accumulate_weight_gradient(one, x[part], dy[part])


def _refuse_padding(drop_and_pad: bool) -> None:
    if drop_and_pad:
        raise NotImplementedError("token permutation: drop_and_pad is not emulated; leave it out")


def _chosen(routing_map: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Probabilities ``[tokens, experts]`` where a token goes to an expert, sorted by expert."""
    return probs.T.masked_select(routing_map.bool().T)


def _spread(routing_map: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_chosen`, zero elsewhere."""
    made = chosen.new_zeros(routing_map.T.shape)
    return made.masked_scatter(routing_map.bool().T, chosen).T.contiguous()


def _summed(rows: torch.Tensor, indices: torch.Tensor, tokens: int) -> torch.Tensor:
    """Rows added to their tokens in fp32, rounded once."""
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
    """Tokens ``[T, H]`` once per expert, sorted by expert, their probabilities and numbers."""
    _refuse_padding(drop_and_pad)
    indices = routing_map.bool().T.nonzero()[:, 1]
    chosen = tokens.new_empty(0) if probs is None else _chosen(routing_map, probs)
    return tokens.index_select(0, indices), chosen, indices


def permute_grad(
    permuted_token_out_grad: torch.Tensor,
    probs_grad: torch.Tensor | None,
    sorted_indices: torch.Tensor,
    routing_map: torch.Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the tokens and of the probabilities ``[T, experts_num]``."""
    _refuse_padding(drop_and_pad)
    spread = permuted_token_out_grad.new_empty(0)
    if probs_grad is not None and probs_grad.numel():
        spread = _spread(routing_map, probs_grad)
    return _summed(permuted_token_out_grad, sorted_indices, tokens_num), spread


def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of what experts made of each token, times probabilities; and three for backward."""
    _refuse_padding(drop_and_pad)
    chosen = permuted_tokens.new_empty(0)
    if probs is not None and routing_map is not None:
        chosen = _chosen(routing_map, probs)
        permuted_tokens = (permuted_tokens * chosen.unsqueeze(-1)).to(permuted_tokens.dtype)
    out = _summed(permuted_tokens, sorted_indices, restore_shape[0])
    return out, sorted_indices.clone(), sorted_indices.clone(), chosen


def unpermute_grad(
    unpermuted_tokens_grad: torch.Tensor,
    out_index: torch.Tensor,
    permuted_token_id: torch.Tensor,
    routing_map: torch.Tensor | None,
    permuted_tokens: torch.Tensor | None,
    probs: torch.Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of what experts made and of the probabilities."""
    _refuse_padding(drop_and_pad)
    grad = unpermuted_tokens_grad.index_select(0, permuted_token_id)
    if probs is None or routing_map is None or permuted_tokens is None:
        return grad, grad.new_empty(0)
    weights = _chosen(routing_map, probs).unsqueeze(-1)
    of_probs = (grad.float() * permuted_tokens.float()).sum(-1).to(probs.dtype)
    return (grad * weights).to(grad.dtype), _spread(routing_map, of_probs)


EXPERT_KERNELS: dict[str, Callable[..., Any]] = {
    "npu_moe_token_permute_with_routing_map": permute,
    "npu_moe_token_permute_with_routing_map_grad": permute_grad,
    "_npu_moe_token_unpermute_with_routing_map": unpermute,
    "npu_moe_token_unpermute_with_routing_map_grad": unpermute_grad,
}
"""By the names of torch_npu's operators, where a version has them."""
