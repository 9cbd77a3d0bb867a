"""A linear layer whose weight is sharded over the data-parallel group, and whose transfers hide.

Legend: ``M`` rows of ``x`` on this rank (its own part of the batch), ``I`` input and ``O`` output
features, ``o`` a rank's share of the output features (O/N), ``N`` ranks, ``W_OI`` the whole weight.

The layer is not parallel: every rank computes all features of its own rows.  What is split is the
memory: a rank keeps ``o`` rows of the weight, of its gradient and of the optimizer's state, and the
weight is put together, block by block, while it is used (ZeRO-3, fully sharded data parallel).

========== ============================================================================
forward    weight arrives -> columns of y
backward   wgrad blocks -> sum; weight arrives -> dgrad, both at once
========== ============================================================================

The whole weight and its whole gradient exist nowhere.  Of what arrives, and of the gradient on its
way out, there are two blocks at a time, or one piece more than there are lanes.

**Exactness.**  The op on lanes and on ``CollectiveTransport(group, same_pieces=True)`` gives the
same bits, if rows are a multiple of 64 bytes long.  An unfused layer differs where the GEMM library
rounds a run of columns differently than all columns together, and in the sum over ``O`` of the
dgrad, which is made block by block here (in fp32, rounded once).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into, kernels_for
from commfuse_npu.ops.call import AnyTransport, Call, check_and_cast, sum_ending
from commfuse_npu.ops.options import LinearOptions, ShardedOptions
from commfuse_npu.ops.weight import SavedWeight
from commfuse_npu.ops.weight_prefetch import PrefetchedWeight, WeightProgram, WeightStamp
from commfuse_npu.plan.rules import Rule, sharded_backward, sharded_forward
from commfuse_npu.runtime.executor import Work
from commfuse_npu.runtime.transport import Transport

__all__ = ["sharded_linear"]


def sharded_linear(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: AnyTransport,
    options: ShardedOptions = ShardedOptions(),
    prefetch: PrefetchedWeight | None = None,
) -> torch.Tensor:
    """``linear(x, all_gather(weight_shard), bias)``: the fully sharded layer.

    Equals::

        W_OI = all_gather(W_oI)
        y_MO = x_MI @ W_OI^T + bias
        # backward
        dx_MI = dy_MO @ W_OI
        dW_oI = reduce_scatter(dy_MO^T @ x_MI) / N        # not divided if average is off

    Timeline of the forward, rank r of 3; a column of it is a block of columns of ``y``::

        compute  | y of own W | y of W r-1 | y of W r-2 |
        links    | W of r-1   | W of r-2   |            |

    Timeline of the backward.  The weight gradients need nothing that has to arrive, so they come
    first: they are sent as they are made, while the weight arrives.  The blocks of the dgrad, own
    weight first, hide the last of both::

        compute  | wgrad for r+1 | wgrad for r+2      | wgrad own | dgrad own | dgrad W r-1 | ...
        links    | W of r-1      | W of r-2, -> r+1   | -> r+2    |           |             | sum

    Args:
        x: ``[..., I]``, any number of rows, not the same on every rank.  Need not be contiguous.
        weight_shard: ``[o, I]``, rows ``r * o`` to ``(r + 1) * o`` of the whole weight, the dtype
            of ``x``; the same shape on every rank.
        bias: ``[O]``, whole and the same on every rank.  Its gradient is that of the rank's own
            rows; it is averaged with those of the other replicated parameters, see
            :func:`~commfuse_npu.ops.sharded_gradients.average_gradients`.
        transport: lanes of the data-parallel group.
        prefetch: the place of this weight in the order of the model's layers.

    Returns:
        ``[..., O]``.

    Without a gradient for the weight none is computed or sent; without one for ``x`` the backward
    gathers nothing.  The ranks have to agree on both.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit each other.
        MismatchError: another rank calls another op, or has a shard of another shape.
        TransportError: a transfer failed.
    """
    name = "sharded_linear"
    linear = LinearOptions(options.schedule, reduce_dtype=options.reduce_dtype)
    x, shard, bias = check_and_cast(
        name, x, weight_shard, bias, transport, linear, shards=transport.size
    )
    stamp = WeightStamp.of(weight_shard)
    call = Call.of(name, transport, options, shard, rows=shard.shape[0])
    ahead = None if prefetch is None else _Ahead(prefetch, stamp)
    y = call.apply(_ShardedLinear, x.reshape(-1, x.shape[-1]), shard, bias, ahead)
    return y.view(*x.shape[:-1], y.shape[1])


class _Ahead(NamedTuple):
    """The place of the weight in the order of the model's layers, and its state at the call."""

    place: PrefetchedWeight
    stamp: WeightStamp


def _run(
    call: Call,
    rule: Rule,
    *needs: bool,
    shard: torch.Tensor,
    works: dict[str, Work],
    ahead: _Ahead | None,
    backward: bool = False,
    **tensors: torch.Tensor,
) -> None:
    """Run the operation of a rule with ``shard``.

    When the last block is there, and not used yet, the links are free for the next layer.
    """
    transport, sums = call.transport, call.options.reduce_dtype
    if ahead is None or "use" not in works or not isinstance(transport, Transport):
        arguments = *shard.shape, *needs
        running = call.begin(rule, *arguments, like=shard, backward=backward, sum_dtype=sums)
        running.run(works, ahead=False, shard=shard, **tensors)
        return
    name = f"{call.name} backward" if backward else call.name
    program = transport.program(rule, call.options.schedule, *shard.shape, *needs)
    gather = WeightProgram(transport, program, name, call.options, sums)
    begun = ahead.place.take(shard, ahead.stamp, gather, backward=backward)
    begun.before_last = {"use": ahead.place.start_next}
    begun.run(works, ahead=False, **tensors)


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shard: torch.Tensor,
        bias: torch.Tensor | None,
        ahead: _Ahead | None,
        call: Call,
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.shard = SavedWeight(shard)
        ctx.call, ctx.ahead = call, ahead
        shard = shard.detach().contiguous()
        y = x.new_empty((x.shape[0], shard.shape[0] * call.transport.size))

        def use(block: torch.Tensor, run: slice) -> None:
            columns_into(y, x, block, bias, run)

        _run(call, sharded_forward, shard=shard, works={"use": use}, ahead=ahead)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        shard = ctx.shard.get(call.name).detach().contiguous()
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        works: dict[str, Work] = {}
        tensors = {}
        grad_x = grad_shard = None
        if needs_weight:
            tensors["out"] = grad_shard = torch.empty_like(shard)
            works["make"] = lambda out, run: wgrad_into(out, grad, x, run)
            works["finish"] = sum_ending(call.transport.size if call.options.average else 1)
        if needs_x:
            grad_x = InputGradient(grad, shard.shape[1])
            works["use"] = grad_x.add
        if works:
            needs = needs_x, needs_weight
            _run(
                call, sharded_backward, *needs, shard=shard, works=works, ahead=ctx.ahead,
                backward=True, **tensors,
            )  # fmt: skip
        grad_bias = grad.sum(dim=0) if needs_bias else None
        return None if grad_x is None else grad_x.result(), grad_shard, grad_bias, None, None


def columns_into(
    y: torch.Tensor, x: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None, run: slice
) -> None:
    """``y[:, run] = x @ block^T + bias[run]``.

    BLAS writes a run of columns as it writes a matrix, in the same time and with the same bits
    (measured on CPU in fp32 and bf16; not tried on an NPU).  A block of its own, or ``y^T``, would
    cost a copy of y.
    """
    gemm_into(y[:, run], x, block.t())
    if bias is not None:
        y[:, run].add_(bias[run])


def wgrad_into(out: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, run: slice) -> None:
    """``out = grad[:, run]^T @ x``."""
    gemm_into(out, grad[:, run].t(), x)


class InputGradient:
    """``sum over blocks of grad[:, run] @ block``, in fp32, rounded once."""

    def __init__(self, grad: torch.Tensor, features: int) -> None:
        self._grad = grad
        self._kernels = kernels_for(grad.device)
        self._sum = grad.new_zeros((grad.shape[0], features), dtype=torch.float32)

    def add(self, block: torch.Tensor, run: slice) -> None:
        # sum += a @ b is the kernel of the weight gradient with a transposed.
        self._kernels.accumulate_weight_gradient(self._sum, self._grad[:, run].t(), block)

    def result(self) -> torch.Tensor:
        return self._sum.to(self._grad.dtype)
