"""What ours is compared with: tensor-parallel linear layers, blocking, sliced, in Megatron's order.

Legend: ``S`` sequence, ``s`` its shard (S/n), ``I`` input and ``O`` output features of this rank.
All tensors have two dimensions here, rows first.

Each form has the four halves of a column-parallel and a row-parallel layer::

    gather_gemm       y_SO = all_gather(x_sI) @ weight^T
    gemm_scatter      y_sO = reduce_scatter(x_SI @ weight^T)
    column_backward   dx_sI = reduce_scatter(dy_SO @ weight);  dw = dy_SO^T @ all_gather(x_sI)
    row_backward      dx_SI = all_gather(dy_sO) @ weight;  dw = all_gather(dy_sO)^T @ x_SI

and :func:`column_parallel` and :func:`row_parallel` make differentiable layers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.plan import split
from commfuse_npu.tools.bench.carriers import Carrier, Pending

__all__ = ["Blocking", "Grads", "MegatronOrder", "Sliced", "column_parallel", "row_parallel"]

Grads = tuple[torch.Tensor, torch.Tensor]
"""Of the input and of the weight."""


class Blocking:
    """One after the other: a collective, then the GEMM, or the GEMM, then the collective.

    ::

        compute  |        | GEMM |          compute  | GEMM |         |
        links    | gather |      |          links    |      | scatter |
    """

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier

    def gather_gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole = self.carrier.gathered(x)
        y = x.new_empty((whole.shape[0], weight.shape[0]))
        gemm_into(y, whole, weight.t())
        self.carrier.give_back(whole)
        return y

    def gemm_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._scattered_product(x, weight.t())

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        grad_x = self._scattered_product(grad, weight)
        whole = self.carrier.gathered(x)
        grad_weight = grad.t().matmul(whole)
        self.carrier.give_back(whole)
        return grad_x, grad_weight

    def row_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        whole = self.carrier.gathered(grad)
        grad_x = torch.empty_like(x)
        gemm_into(grad_x, whole, weight)
        grad_weight = whole.t().matmul(x)
        self.carrier.give_back(whole)
        return grad_x, grad_weight

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        full = self._take(a, a.shape[0], b.shape[1])
        gemm_into(full, a, b)
        out = a.new_empty((a.shape[0] // self.carrier.size, b.shape[1]))
        result = self.carrier.scattered(full, out)
        self.carrier.pool.give_back([full])
        return result

    def _take(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        return self.carrier.pool.take(shape, like.dtype, like.device)

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
        gather = self.carrier.gather(x)
        full = self._take(grad, grad.shape[0], weight.shape[1])
        gemm_into(full, grad, weight)
        whole = gather.wait()
        grad_x = torch.empty_like(x)
        scatter = self.carrier.scatter(full, grad_x)
        grad_weight = grad.t().matmul(whole)
        grad_x = scatter.wait()
        self.carrier.pool.give_back([full])
        self.carrier.give_back(whole)
        return grad_x, grad_weight


class Sliced(Blocking):
    """The rows in slices, a smaller collective per slice, pipelined with the GEMMs.

    MindSpeed's CoC, from its description: slices along m, one asynchronous collective per slice,
    then a copy that puts the rows where they belong.  The first or the last slice is exposed::

        compute  |          | GEMM 0   | GEMM 1   |      compute  | GEMM 0 | GEMM 1    |           |
        links    | gather 0 | gather 1 |          |      links    |        | scatter 0 | scatter 1 |

    In the backward dx is scattered in slices, and the weight gradient, which needs all rows, runs
    as one GEMM over the last of them.  A rank's block must have as many rows as there are slices.
    """

    def __init__(self, carrier: Carrier, slices: int) -> None:
        super().__init__(carrier)
        self._slices = slices

    def gather_gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((self.carrier.size * x.shape[0], weight.shape[0]))
        for run, whole in self._gathered(x):
            self._product_into(y, run, whole, weight.t())
        return y

    def gemm_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, rest = self._begin_scatters(x, weight.t())
        self._finish_scatters(rest)
        return y

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        gather = self.carrier.gather(x)
        grad_x, rest = self._begin_scatters(grad, weight)
        whole = gather.wait()
        grad_weight = grad.t().matmul(whole)
        self.carrier.give_back(whole)
        self._finish_scatters(rest)
        return grad_x, grad_weight

    def row_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        size = self.carrier.size
        grad_x = torch.empty_like(x)
        whole = self._take(grad, size * grad.shape[0], grad.shape[1])
        for run, part in self._gathered(grad):
            self._product_into(grad_x, run, part, weight)
            self._blocks(whole)[:, run].copy_(self._blocks(part))
        grad_weight = whole.t().matmul(x)
        self.carrier.pool.give_back([whole])
        return grad_x, grad_weight

    def _runs(self, rows: int) -> list[slice]:
        return [slice(start, stop) for start, stop in pairwise(split(rows, self._slices))]

    def _gathered(self, shard: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """``(rows of a shard, these rows of all shards)``, one slice after the other."""
        runs = self._runs(shard.shape[0])
        # Where several would share the link, only the next one is under way.
        ahead = len(runs) if self.carrier.in_order else 1
        under_way = [self.carrier.gather(shard[run]) for run in runs[:ahead]]
        for number, run in enumerate(runs):
            whole = under_way[number].wait()
            if len(under_way) < len(runs):
                under_way.append(self.carrier.gather(shard[runs[len(under_way)]]))
            yield run, whole
            self.carrier.give_back(whole)

    def _product_into(
        self, y: torch.Tensor, run: slice, whole: torch.Tensor, b: torch.Tensor
    ) -> None:
        """One GEMM over this slice of all blocks, then the copy to where its rows belong."""
        part = self._take(y, whole.shape[0], b.shape[1])
        gemm_into(part, whole, b)
        self._blocks(y)[:, run].copy_(self._blocks(part))
        self.carrier.pool.give_back([part])

    def _begin_scatters(
        self, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[Pending, torch.Tensor]]]:
        y = a.new_empty((a.shape[0] // self.carrier.size, b.shape[1]))
        under_way: list[tuple[Pending, torch.Tensor]] = []
        for run in self._runs(y.shape[0]):
            rows = self._take(a, self.carrier.size * (run.stop - run.start), a.shape[1])
            self._blocks(rows).copy_(self._blocks(a)[:, run])
            full = self._take(a, rows.shape[0], b.shape[1])
            gemm_into(full, rows, b)
            self.carrier.pool.give_back([rows])
            if not self.carrier.in_order:
                self._finish_scatters(under_way)
            under_way.append((self.carrier.scatter(full, y[run]), full))
        return y, under_way

    def _finish_scatters(self, under_way: list[tuple[Pending, torch.Tensor]]) -> None:
        while under_way:
            pending, full = under_way.pop(0)
            pending.wait()
            self.carrier.pool.give_back([full])


def column_parallel(form: Blocking, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[s, ..., I] -> [S, ..., O]``."""
    return _layer(x, weight, form.gather_gemm, form.column_backward)


def row_parallel(form: Blocking, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[S, ..., I] -> [s, ..., O]``."""
    return _layer(x, weight, form.gemm_scatter, form.row_backward)


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
