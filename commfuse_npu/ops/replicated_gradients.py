"""Gradients of the parameters that stay replicated beside fully sharded layers."""

from __future__ import annotations

import torch

from commfuse_npu.ops.sharded_module import ShardedLinear
from commfuse_npu.runtime.transport import Transport

__all__ = ["average_gradients", "sum_gradients"]


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
    shards = set()
    for path, layer in module.named_modules():
        if isinstance(layer, ShardedLinear):
            _check_layer(name, path, layer, transport, average)
            shards.add(id(layer.weight))
            if layer.prefetch is not None:
                # The weights are about to change.
                layer.prefetch.end_pass()
    replicated = [
        (path, parameter)
        for path, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in shards
    ]
    for path, parameter in replicated:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"{name}: the gradient of {path} is {parameter.grad.layout}; make it dense "
                "(torch.nn.Embedding with sparse=False)"
            )
    transport.agree(
        name, parameters=tuple((path, tuple(p.shape), p.dtype) for path, p in replicated)
    )
    if transport.size > 1:
        _all_reduce(name, [parameter for _, parameter in replicated], transport, average)


def _check_layer(
    name: str, path: str, layer: ShardedLinear, transport: Transport, average: bool
) -> None:
    if layer.transport is not transport:
        raise ValueError(
            f"{name}: {path} is sharded over another transport; call it with that of the layers"
        )
    if layer.options.average is not average:
        other = "sum_gradients" if average else "average_gradients"
        raise ValueError(
            f"{name}: {path} has average={layer.options.average}, and its gradient would not fit "
            f"those of the replicated parameters; use {other}"
        )


def _all_reduce(
    name: str, parameters: list[torch.nn.Parameter], transport: Transport, average: bool
) -> None:
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    # How many ranks have a gradient, for each; and one number more, so that there is one.
    present = [1.0, *(float(parameter.grad is not None) for parameter in parameters)]
    sizes = [len(present), *(parameter.numel() for parameter in parameters)]
    device = transport.device_type
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
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
