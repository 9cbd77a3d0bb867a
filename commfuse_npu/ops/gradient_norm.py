"""The gradient norm of a model whose linear layers are fully sharded, and clipping by it."""

from __future__ import annotations

import math

import torch

from commfuse_npu.ops.sharded_module import ShardedLinear
from commfuse_npu.runtime.transport import Transport

__all__ = ["clip_gradient_norm"]


@torch.no_grad()
def clip_gradient_norm(
    module: torch.nn.Module, max_norm: float, transport: Transport
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over the whole model, of which a rank has shards.

    Call it on every rank after :func:`~commfuse_npu.ops.replicated_gradients.average_gradients`:
    what is replicated has the same gradient everywhere then, and is counted once.  Squares are
    summed in fp32 (fp64 stays), over the shards of all ranks in one all-reduce of one number.  All
    ranks scale by the same factor, ``max_norm / (norm + 1e-6)`` where that is less than 1.

    Args:
        max_norm: above 0; ``math.inf`` to measure only.

    Returns:
        The norm before clipping, a number without dimensions, the same on every rank.  Not finite
        if a gradient is not; the gradients are then left as they are, so that a caller can skip the
        step.

    Raises:
        ValueError: ``max_norm`` is not above 0.
        TransportError: a rank did not come in time, or the transport was broken before.
    """
    if not max_norm > 0:
        raise ValueError(
            f"clip_gradient_norm: max_norm is {max_norm}; it has to be above 0, math.inf to only "
            "measure the norm"
        )
    transport.agree("clip_gradient_norm", max_norm=max_norm)
    layers = [m for m in module.modules() if isinstance(m, ShardedLinear)]
    shards = {id(layer.weight) for layer in layers}
    gradients = [(p.grad, id(p) in shards) for p in module.parameters() if p.grad is not None]
    dtype = torch.float32
    for parameter in module.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
    square = torch.zeros((), dtype=dtype, device=transport.device_type)
    _add_squares(square, [grad for grad, sharded in gradients if sharded])
    if transport.size > 1:
        transport.all_reduce("clip_gradient_norm", square)
    _add_squares(square, [grad for grad, sharded in gradients if not sharded])
    norm = square.sqrt()
    if math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad, _ in gradients:
            grad.mul_(factor.to(grad.dtype))
    return norm


def _add_squares(total: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    for grad in gradients:
        total += torch.linalg.vector_norm(grad, dtype=total.dtype).square()
