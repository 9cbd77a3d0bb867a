"""Averages and clips the gradients of a model with fully sharded layers, before the optimizer step.

Gradients of replicated parameters are averaged over the ranks; the norm is over all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import torch

from commfuse_npu.ops.sharded_linear import ShardedLinear, shards_of
from commfuse_npu.runtime.transport import Transport

__all__ = ["average_gradients", "clip_gradient_norm"]


def average_gradients(module: torch.nn.Module, transport: Transport) -> None:
    """Average the gradients of replicated parameters over the group; call it before every step.

    Equals, but for one rounding less with 16-bit parameters::

        for parameter in replicated:
            all_reduce(parameter.grad)
            parameter.grad /= N

    All parameters of ``module`` are replicated (norms, embeddings, biases) except the weights of
    :class:`~commfuse_npu.ops.sharded_linear.ShardedLinear`.  One all-reduce on the transport's
    plain group sums them in one buffer, in fp32 (fp64 if a parameter has it).  A missing gradient
    counts as zero if another rank has one; if no rank has one, it stays ``None``.

    Call it on every rank between the backward and ``optimizer.step()``, even if the module has no
    replicated parameters.  It is also a barrier: it returns only after all ranks have called it, so
    no rank steps if another failed in its forward or backward.  On gloo the others get an error
    within the transport's timeout, on HCCL within HCCL's own.

    Raises:
        ValueError: a layer belongs to another transport.
        TypeError: a gradient is sparse.
        MismatchError: the ranks have different parameters.
        TransportError: a rank did not call it in time, or the transport was broken before.
    """
    name = "average_gradients"
    for path, layer in module.named_modules():
        if isinstance(layer, ShardedLinear) and layer.transport is not transport:
            raise ValueError(
                f"{name}: {path} is sharded over another transport; call it with that of the layers"
            )
    shards = shards_of(module)
    replicated = {
        path: parameter
        for path, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in shards
    }
    for path, parameter in replicated.items():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"{name}: the gradient of {path} is {parameter.grad.layout}; make it dense "
                "(torch.nn.Embedding with sparse=False)"
            )
    transport.agree(
        name, parameters=tuple((path, tuple(p.shape), p.dtype) for path, p in replicated.items())
    )
    if transport.size == 1:
        return
    parameters = list(replicated.values())
    # For each parameter, whether it has a gradient here; one more, so that the buffer is not empty.
    present = [1.0, *(float(parameter.grad is not None) for parameter in parameters)]
    sizes = [len(present), *(parameter.numel() for parameter in parameters)]
    flat = torch.zeros(sum(sizes), dtype=_wide(parameters), device=transport.device_type)
    counts, *sums = flat.split(sizes)
    counts.copy_(torch.tensor(present))
    for parameter, total in zip(parameters, sums, strict=True):
        if parameter.grad is not None:
            total.copy_(parameter.grad.detach().reshape(-1))
    transport.all_reduce(name, flat)
    for parameter, total, count in zip(parameters, sums, counts[1:].tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.detach().copy_(total.div_(transport.size).view(parameter.shape))


def _wide(parameters: Iterable[torch.nn.Parameter]) -> torch.dtype:
    """The dtype in which gradients are summed: fp32, or fp64 if a parameter has it."""
    return reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)


@torch.no_grad()
def clip_gradient_norm(
    module: torch.nn.Module, max_norm: float, transport: Transport
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over the whole model, shards of all ranks included.

    Call it on every rank after :func:`~commfuse_npu.ops.sharded_gradients.average_gradients`:
    replicated parameters then have equal gradients on all ranks, and count once.  Squares are
    summed in fp32 (fp64 stays), over the shards of all ranks with an all-reduce of one element.
    All ranks scale by the same factor, ``max_norm / (norm + 1e-6)`` where that is less than 1.

    Args:
        max_norm: above 0; ``math.inf`` only measures the norm.

    Returns:
        The norm before clipping, a 0-dimensional tensor, equal on every rank.  If a gradient is not
        finite, neither is the norm, and the gradients are not scaled: the caller can skip the step.

    Raises:
        ValueError: ``max_norm`` is not above 0.
        TransportError: a rank did not call it in time, or the transport was broken before.
    """
    if not max_norm > 0:
        raise ValueError(
            f"clip_gradient_norm: max_norm is {max_norm}; it has to be above 0, math.inf to only "
            "measure the norm"
        )
    transport.agree("clip_gradient_norm", max_norm=max_norm)
    shards = shards_of(module)
    gradients = [(p.grad, id(p) in shards) for p in module.parameters() if p.grad is not None]
    square = torch.zeros((), dtype=_wide(module.parameters()), device=transport.device_type)
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
