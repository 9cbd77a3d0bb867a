"""A linear layer with its weight sharded over the data-parallel group, gathered during the GEMMs.

Legend: ``M`` rows of ``x`` on this rank (its own part of the batch), ``I`` input and ``O`` output
features, ``o`` a rank's share of the output features (O/N), ``N`` ranks, ``W_OI`` the whole weight.

The layer is not tensor-parallel: every rank computes all features of its own rows.  Only memory is
split: a rank keeps ``o`` rows of the weight, of its gradient and of the optimizer state.  Blocks of
the weight are gathered while others are used (ZeRO-3, fully sharded data parallel).

========== ============================================================================
forward    weight arrives -> columns of y
backward   wgrad blocks -> sum; weight arrives -> dgrad, both at once
========== ============================================================================

No rank holds the whole weight or its whole gradient.  There is memory for two blocks at a time of
the arriving weight, and of the gradient being sent; or for one piece more than there are lanes.

**Exactness.**  The op on lanes and on ``CollectiveTransport(group, same_pieces=True)`` gives the
same bits, if rows are a multiple of 64 bytes long.  An unfused layer differs where the GEMM library
rounds a run of columns differently from all columns together, and in the sum over ``O`` in the
dgrad, which is computed block by block here (in fp32, rounded once).
"""

from __future__ import annotations

import torch

from commfuse_npu.kernels import gemm_into, kernels_for
from commfuse_npu.ops.call import AnyTransport, Call, Tensors, check_and_cast, sum_ending
from commfuse_npu.ops.options import LinearOptions, ShardedOptions
from commfuse_npu.ops.weight_prefetch import PrefetchedWeight, stamp_of
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

    Timeline of the backward.  The weight gradients do not need the gathered weight, so they come
    first: each block is sent when it is computed, while the weight arrives.  The blocks of the
    dgrad, own weight first, overlap with the last transfers of both::

        compute  | wgrad for r+1 | wgrad for r+2      | wgrad own | dgrad own | dgrad W r-1 | ...
        links    | W of r-1      | W of r-2, -> r+1   | -> r+2    |           |             | sum

    Args:
        x: ``[..., I]``, any number of rows, which may differ per rank.  Need not be contiguous.
        weight_shard: ``[o, I]``, rows ``r * o`` to ``(r + 1) * o`` of the whole weight, the dtype
            of ``x``; the same shape on every rank.
        bias: ``[O]``, full and equal on every rank.  Its gradient is that of the rank's own rows;
            average it with those of the other replicated parameters, see
            :func:`~commfuse_npu.ops.sharded_gradients.average_gradients`.
        transport: lanes of the data-parallel group.
        prefetch: the weight's entry in the model's :class:`.weight_prefetch.WeightPrefetch`.

    Returns:
        ``[..., O]``.

    If the weight needs no gradient, none is computed or sent.  If ``x`` needs none, the backward
    does not gather the weight.  Both have to be the same on every rank.

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
    flat = x.flatten(0, -2)
    call = _ShardedLinear(name, transport, options, shard, rows=shard.shape[0])
    call.place, call.stamp = prefetch, stamp_of(weight_shard)
    y = call(flat, shard, bias)
    return y.view(*x.shape[:-1], y.shape[1])


class _ShardedLinear(Call):
    place: PrefetchedWeight | None
    """The weight's entry in the prefetch of the model."""

    stamp: tuple[int, int | None]
    """Address and version of the weight at the call."""

    def forward(
        self, x: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        x, shard = x.contiguous(), shard.detach().contiguous()
        y = x.new_empty((x.shape[0], shard.shape[0] * self.transport.size))

        def use(block: torch.Tensor, run: slice) -> None:
            columns_into(y, x, block, bias, run)

        self._run(sharded_forward, {"use": use}, shard)
        return y, (x if self.needs[1] else None,)

    def backward(self, grad: torch.Tensor) -> Tensors:
        (x,), shard = self.saved(), self.weight.detach().contiguous()
        needs_x, needs_weight, needs_bias = self.needs
        out = torch.empty_like(shard) if needs_weight else None
        # Summed over the blocks in fp32, rounded once.
        columns = shard.shape[1] if needs_x else 0
        total = grad.new_zeros((grad.shape[0], columns), dtype=torch.float32)
        works: dict[str, Work] = {
            "make": lambda out, run: wgrad_into(out, grad, x, run),
            "finish": sum_ending(self.transport.size if self.options.average else 1),
            "use": lambda block, run: add_dgrad(total, grad, block, run),
        }
        if needs_x or needs_weight:
            self._run(sharded_backward, works, shard, out, needs_x, needs_weight)
        grad_x = total.to(grad.dtype) if needs_x else None
        return grad_x, out, grad.sum(dim=0) if needs_bias else None

    def _run(
        self,
        rule: Rule,
        works: dict[str, Work],
        shard: torch.Tensor,
        out: torch.Tensor | None = None,
        *needs: bool,
    ) -> None:
        """Run the forward, or the backward with ``needs``: gradients of x and of the weight.

        Before the last block is used, all have arrived, so the next layer's gather starts then.
        """
        place, backward = self.place, bool(needs)
        arguments, sums = (*shard.shape, *needs), self.options.reduce_dtype
        gathers, lanes = all(needs[:1]), self.transport
        if place is None or not gathers or not isinstance(lanes, Transport):
            begun = self.begin(rule, *arguments, like=shard, backward=backward, sum_dtype=sums)
            begun.run(works, shard=shard, out=out)
            return
        order, program = place.prefetch, lanes.program(rule, self.options.schedule, *arguments)
        name = f"{self.name} backward" if backward else self.name
        operation = lanes, program, name, self.options, sums
        running = order.take(place.number, shard, self.stamp, operation, backward=backward)
        running.before_last = {"use": order.start_next}
        running.run(works, out=out)


def columns_into(
    y: torch.Tensor, x: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None, run: slice
) -> None:
    """``y[:, run] = x @ block^T + bias[run]``.

    BLAS writes a run of columns in the same time and with the same bits as a contiguous matrix
    (measured on CPU in fp32 and bf16; not tried on an NPU).  A separate result, or ``y^T``, would
    cost a copy of y.
    """
    gemm_into(y[:, run], x, block.t())
    if bias is not None:
        y[:, run].add_(bias[run])


def wgrad_into(out: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, run: slice) -> None:
    """``out = grad[:, run]^T @ x``."""
    gemm_into(out, grad[:, run].t(), x)


def add_dgrad(total: torch.Tensor, grad: torch.Tensor, block: torch.Tensor, run: slice) -> None:
    """``total += grad[:, run] @ block``, with the kernel of the weight gradient."""
    kernels_for(grad.device).accumulate_weight_gradient(total, grad[:, run].t(), block)
