"""Baselines for comparison: tensor-parallel linear layers, blocking or in slices.

Legend: ``S`` sequence, ``s`` its shard (S/n), ``I`` input and ``O`` output features of this rank.
All tensors here are two-dimensional, rows first.

Each form implements the four halves of a column-parallel and a row-parallel layer::

    gather_gemm       y_SO = all_gather(x_sI) @ weight^T
    gemm_scatter      y_sO = reduce_scatter(x_SI @ weight^T)
    column_backward   dx_sI = reduce_scatter(dy_SO @ weight);  dw = dy_SO^T @ all_gather(x_sI)
    row_backward      dx_SI = all_gather(dy_sO) @ weight;  dw = all_gather(dy_sO)^T @ x_SI

and differentiable layers made of them, with the interface of :mod:`commfuse_npu.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.plan import split
from commfuse_npu.tools.measure.carriers import Carrier, Pending

__all__ = ["Blocking", "MegatronOrder", "Sliced", "in_order"]

Grads = tuple[torch.Tensor, torch.Tensor]
"""Gradients of the input and of the weight."""

_RUNS = 8
"""Ranges of queries in attention, one kernel each.  As in the fused form, masked parts are skipped;
the number equals the blocks of eight ranks."""

_Call = Callable[[], Any]


def in_order(forward: _Call, backward: _Call) -> tuple[Any, Any]:
    """Run the backward, then the forward; return (result of forward, result of backward)."""
    result = backward()
    return forward(), result


class Blocking:
    """Sequential: a collective, then the GEMM, or the GEMM, then the collective.

    ::

        compute  |        | GEMM |          compute  | GEMM |         |
        links    | gather |      |          links    |      | scatter |
    """

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier

    def all_gather_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[s, ..., I] -> [S, ..., O]``."""
        return _layer(x, weight, self.gather_gemm, self.column_backward)

    def linear_reduce_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[S, ..., I] -> [s, ..., O]``."""
        return _layer(x, weight, self.gemm_scatter, self.row_backward)

    def attention_linear_reduce_scatter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """``q [S, B, A, D]``, k and v ``[S, B, G, D] -> [s, B, O]``, causal."""
        rows = [slice(*run) for run in pairwise(split(q.shape[0], _RUNS))]
        attended = _Attention.apply(q.contiguous(), k.contiguous(), v.contiguous(), rows)
        return self.linear_reduce_scatter(attended.flatten(2), weight)

    def blocked_seconds(self) -> float:
        """Host seconds spent waiting for transfers since the start."""
        return self.carrier.blocked_seconds

    def pair(self, forward: _Call, backward: _Call) -> tuple[Any, Any]:
        """Run the forward of one micro-batch and the backward of another."""
        return in_order(forward, backward)

    def gather_gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._gathered_product(x, weight.t(), keep=False)[0]

    def gemm_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._scattered_product(x, weight.t())

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        grad_x = self._scattered_product(grad, weight)
        whole = self.carrier.gather(x).result()
        grad_weight = grad.t().matmul(whole)
        self.carrier.release(whole)
        return grad_x, grad_weight

    def row_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        grad_x, whole = self._gathered_product(grad, weight, keep=True)
        grad_weight = whole.t().matmul(x)
        self.carrier.release(whole)
        return grad_x, grad_weight

    def _gathered_product(
        self, shard: torch.Tensor, b: torch.Tensor, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``all_gather(shard) @ b``, and with ``keep`` the gathered tensor, to be given back."""
        whole = self.carrier.gather(shard).result()
        y = self._like_all(shard, b)
        gemm_into(y, whole, b)
        if not keep:
            self.carrier.release(whole)
        return y, whole

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        full = self.carrier.take(a, a.shape[0], b.shape[1])
        gemm_into(full, a, b)
        result = self.carrier.scatter(full, self._like_own(a, b)).result()
        self.carrier.release(full)
        return result

    def _like_all(self, shard: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return shard.new_empty((self.carrier.size * shard.shape[0], b.shape[1]))

    def _like_own(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.new_empty((a.shape[0] // self.carrier.size, b.shape[1]))

    def _blocks(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.unflatten(0, (self.carrier.size, -1))


class MegatronOrder(Blocking):
    """Megatron-Core's column-parallel backward: two collectives behind two GEMMs.

    Read in ``LinearWithGradAccumulationAndAsyncCommunication`` of Megatron-Core 0.12::

        compute  | dgrad    |              wgrad   |
        links    | gather x | reduce-scatter of dx |

    Forward, and the backward of the row-parallel layer, block.
    """

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        gather = self.carrier.gather(x).overlapping()
        full = self.carrier.take(grad, grad.shape[0], weight.shape[1])
        gemm_into(full, grad, weight)
        whole = gather.result()
        scatter = self.carrier.scatter(full, torch.empty_like(x)).overlapping()
        grad_weight = grad.t().matmul(whole)
        grad_x = scatter.result()
        self.carrier.release(full, whole)
        return grad_x, grad_weight


class Sliced(Blocking):
    """The rows in slices, with a smaller collective per slice, pipelined with the GEMMs.

    This is MindSpeed's CoC, from its description: slices along m, one asynchronous collective per
    slice, then a copy that restores the order of rows.  The first or the last slice is exposed::

        compute  |          | GEMM 0   | GEMM 1   |      compute  | GEMM 0 | GEMM 1    |           |
        links    | gather 0 | gather 1 |          |      links    |        | scatter 0 | scatter 1 |

    In the backward, dx is scattered in slices.  The weight gradient needs all rows and runs as one
    GEMM during the last scatter.  A rank's block must have at least as many rows as slices.
    """

    def __init__(self, carrier: Carrier, slices: int) -> None:
        super().__init__(carrier)
        self._slices = slices

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        gather = self.carrier.gather(x)
        grad_x, pending = self._begin_scatters(grad, weight)
        whole = gather.result()
        grad_weight = grad.t().matmul(whole)
        self.carrier.release(whole)
        self._finish_scatters(pending)
        return grad_x, grad_weight

    def _gathered_product(
        self, shard: torch.Tensor, b: torch.Tensor, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, rows = self._like_all(shard, b), self.carrier.size * shard.shape[0]
        whole = self.carrier.take(shard, rows, shard.shape[1]) if keep else shard
        for run, part in self._gathered(shard):
            product = self.carrier.take(y, part.shape[0], b.shape[1])
            gemm_into(product, part, b)
            self._blocks(y)[:, run].copy_(self._blocks(product))
            if keep:
                self._blocks(whole)[:, run].copy_(self._blocks(part))
            self.carrier.release(product, part)
        return y, whole

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, pending = self._begin_scatters(a, b)
        self._finish_scatters(pending)
        return y

    def _runs(self, rows: int) -> list[slice]:
        return [slice(start, stop) for start, stop in pairwise(split(rows, self._slices))]

    def _gathered(self, shard: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ``(rows of a shard, these rows of all shards)``, slice by slice."""
        runs = self._runs(shard.shape[0])
        pending = [self.carrier.gather(shard[run]) for run in runs]
        for run, gather in zip(runs, pending, strict=True):
            yield run, gather.result()

    def _begin_scatters(
        self, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[Pending, torch.Tensor]]]:
        y, take = self._like_own(a, b), self.carrier.take
        pending: list[tuple[Pending, torch.Tensor]] = []
        for run in self._runs(y.shape[0]):
            rows = take(a, self.carrier.size * (run.stop - run.start), a.shape[1])
            self._blocks(rows).copy_(self._blocks(a)[:, run])
            full = take(a, rows.shape[0], b.shape[1])
            gemm_into(full, rows, b)
            self.carrier.release(rows)
            pending.append((self.carrier.scatter(full, y[run]), full))
        return y, pending

    def _finish_scatters(self, under_way: list[tuple[Pending, torch.Tensor]]) -> None:
        while under_way:
            scatter, full = under_way.pop(0)
            scatter.result()
            self.carrier.release(full)


def _layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Grads],
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: torch.Tensor = _Layer.apply(rows, weight, forward, backward)
    return y.view(-1, *x.shape[1:-1], weight.shape[0])


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, run: Any, back: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.back = back
        return run(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.back(grad.contiguous(), *ctx.saved_tensors), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Any) -> Any:
        ctx.runs, ctx.rows = AttentionRuns(causal=True), rows
        ctx.runs.begin(q, k, v, keep=True)
        for run in rows:
            ctx.runs.forward(run)
        attended, *others = ctx.runs.saved()
        ctx.save_for_backward(attended, *others)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.runs.resume(ctx.saved_tensors)
        grad = grad.contiguous()
        for run in ctx.rows:
            ctx.runs.backward(grad[run], run)
        return *ctx.runs.gradients(), None
