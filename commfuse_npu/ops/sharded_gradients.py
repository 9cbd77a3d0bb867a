"""Gradients of a model with fully sharded layers, before its optimizer's step.

Those of the parameters that stay replicated are averaged over the ranks; the norm is that of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import torch

from commfuse_npu.ops.sharded_module import ShardedLinear, shards_of
from commfuse_npu.runtime.transport import Transport

__all__ = ["average_gradients", "clip_gradient_norm", "sum_gradients"]


def average_gradients(module: torch.nn.Module, transport: Transport) -> None:
    """Average the gradients of norms, embeddings and biases over the group; before every step.

    Equals, but for one rounding less with 16-bit parameters::

        for parameter in replicated:
            all_reduce(parameter.grad)
            parameter.grad /= N

    Replicated is every parameter of ``module`` that is not the weight of a
    :class:`~commfuse_npu.ops.sharded_module.ShardedLinear`.  They travel in one buffer, in fp32,
    with one collective on the transport's plain group.  A parameter without a gradient on some
    ranks counts as zero there; without one on all ranks it stays without.

    Call it on every rank between the backward and ``optimizer.step()``, also for a module that has
    no replicated parameters.  It is where the ranks meet: it returns on a rank only when all of
    them have come here, so that none steps if one failed in its forward or backward.  On gloo the
    others learn it within the transport's time limit, on HCCL within HCCL's own.

    Raises:
        ValueError: a layer sums its gradients (``average=False``), or belongs to another transport.
        TypeError: a gradient is sparse.
        MismatchError: the ranks hold different parameters.
        TransportError: a rank did not come, or the transport was broken before.
    """
    _reduce("average_gradients", module, transport, average=True)


def sum_gradients(module: torch.nn.Module, transport: Transport) -> None:
    """:func:`average_gradients` without the division, beside layers with ``average=False``."""
    _reduce("sum_gradients", module, transport, average=False)


def _reduce(name: str, module: torch.nn.Module, transport: Transport, *, average: bool) -> None:
    for path, layer in module.named_modules():
        if not isinstance(layer, ShardedLinear):
            continue
        if layer.transport is not transport:
            raise ValueError(
                f"{name}: {path} is sharded over another transport; call it with that of the layers"
            )
        if layer.options.average is not average:
            other = "sum_gradients" if average else "average_gradients"
            raise ValueError(
                f"{name}: {path} has average={layer.options.average}, and its gradient would not "
                f"fit those of the replicated parameters; use {other}"
            )
        if layer.prefetch is not None:
            # The weights are about to change.
            layer.prefetch.end_pass()
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
    # How many ranks have a gradient, for each; and one number more, so that there is one.
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
        if average:
            total.div_(transport.size)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.detach().copy_(total.view(parameter.shape))


def _wide(parameters: Iterable[torch.nn.Parameter]) -> torch.dtype:
    """What their gradients are summed in: fp32, or fp64 if one of them is."""
    return reduce(torch.promote_types, (one.dtype for one in parameters), torch.float32)


@torch.no_grad()
def clip_gradient_norm(
    module: torch.nn.Module, max_norm: float, transport: Transport
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over the whole model, of which a rank has shards.

    Call it on every rank after :func:`~commfuse_npu.ops.sharded_gradients.average_gradients`:
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
