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

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.differentiable import differentiable
from commfuse_npu.layers.linear_arguments import check_and_cast
from commfuse_npu.layers.options import LinearOptions, ShardedOptions
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.layers.sharded_blocks import InputGradient, columns_into, wgrad_into
from commfuse_npu.ops.job import AnyRun, AnyTransport, transport_for
from commfuse_npu.ops.sum_ending import sum_ending
from commfuse_npu.ops.weight_prefetch import PrefetchedWeight, WeightProgram, WeightStamp
from commfuse_npu.plan.program import Compute
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
            :func:`~commfuse_npu.ops.replicated_gradients.average_gradients`.
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
    transport = transport_for(name, shard, transport, rows=shard.shape[0])
    call = _Call(name, transport, options, stamp, prefetch)
    flat = x.reshape(-1, x.shape[-1])
    y = differentiable(_ShardedLinear, flat, shard, bias, call)
    return y.view(*x.shape[:-1], y.shape[1])


@dataclass(frozen=True)
class _Call:
    """One call; forward and backward have the same."""

    name: str
    transport: AnyTransport
    options: ShardedOptions
    stamp: WeightStamp
    prefetch: PrefetchedWeight | None

    def run(
        self,
        rule: Rule,
        *needs: bool,
        shard: torch.Tensor,
        works: dict[str, Work],
        backward: bool,
        **tensors: torch.Tensor,
    ) -> None:
        """Run the operation of a rule with ``shard``.

        When the last block is there, and not used yet, the links are free for the next layer.
        """
        name = f"{self.name} backward" if backward else self.name
        program: Any = self.transport.program(rule, self.options.schedule, *shard.shape, *needs)
        options, sums = self.options, self.options.reduce_dtype
        prefetch, transport = self.prefetch, self.transport
        if prefetch is None or "use" not in works or not isinstance(transport, Transport):
            running: AnyRun = transport.begin(program, name, shard, options, sums)
            running.run(works, ahead=False, shard=shard, **tensors)
            return
        left = program.count(Compute, "use")
        use = works["use"]

        def use_and_prefetch(block: torch.Tensor, run: slice) -> None:
            nonlocal left
            left -= 1
            if not left:
                prefetch.start_next()
            use(block, run)

        call = WeightProgram(transport, program, name, options, sums)
        running = prefetch.take(shard, self.stamp, call, backward=backward)
        running.run({**works, "use": use_and_prefetch}, ahead=False, **tensors)


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.shard = SavedWeight(shard)
        ctx.call = call
        shard = shard.detach().contiguous()
        y = x.new_empty((x.shape[0], shard.shape[0] * call.transport.size))

        def use(block: torch.Tensor, run: slice) -> None:
            columns_into(y, x, block, bias, run)

        call.run(sharded_forward, shard=shard, works={"use": use}, backward=False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        shard = ctx.shard.get(call.name).detach().contiguous()
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
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
            call.run(sharded_backward, *needs, shard=shard, works=works, backward=True, **tensors)
        grad_bias = grad.sum(dim=0) if needs_bias else None
        return None if grad_x is None else grad_x.result(), grad_shard, grad_bias, None
