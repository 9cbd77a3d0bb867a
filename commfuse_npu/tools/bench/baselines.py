"""What ours is compared with: tensor-parallel linear layers, blocking, in slices, around a ring.

Legend: ``S`` sequence, ``s`` its shard (S/n), ``I`` input and ``O`` output features of this rank.
All tensors have two dimensions here, rows first.

Each form has the four halves of a column-parallel and a row-parallel layer::

    gather_gemm       y_SO = all_gather(x_sI) @ weight^T
    gemm_scatter      y_sO = reduce_scatter(x_SI @ weight^T)
    column_backward   dx_sI = reduce_scatter(dy_SO @ weight);  dw = dy_SO^T @ all_gather(x_sI)
    row_backward      dx_SI = all_gather(dy_sO) @ weight;  dw = all_gather(dy_sO)^T @ x_SI

and differentiable layers made of them, which are called as those of :mod:`commfuse_npu.ops` are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.ops.attention_mask import AttentionMask
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.plan import split
from commfuse_npu.tools.bench.carriers import Carrier, DirectExchange, Pending

__all__ = ["Blocking", "Grads", "MegatronOrder", "Ring", "Sliced", "in_order"]

Grads = tuple[torch.Tensor, torch.Tensor]
"""Of the input and of the weight."""

_RUNS = 8
"""Of queries in attention, a kernel each, so that what the mask hides is skipped as in what it is
compared with: as many as eight ranks have blocks."""

_Call = Callable[[], Any]


def in_order(forward: _Call, backward: _Call) -> tuple[Any, Any]:
    """The backward, then the forward; returns the results of the forward and of the backward."""
    result = backward()
    return forward(), result


class Blocking:
    """One after the other: a collective, then the GEMM, or the GEMM, then the collective.

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
        """Host time spent in waits for transfers since the start."""
        return self.carrier.blocked_seconds

    def pair(self, forward: _Call, backward: _Call) -> tuple[Any, Any]:
        """The forward of a micro-batch and the backward of another one."""
        return in_order(forward, backward)

    def gather_gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._gathered_product(x, weight.t(), keep=False)[0]

    def gemm_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._scattered_product(x, weight.t())

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        grad_x = self._scattered_product(grad, weight)
        whole = self.carrier.gather(x).result()
        grad_weight = grad.t().matmul(whole)
        self.carrier.give_back(whole)
        return grad_x, grad_weight

    def row_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        grad_x, whole = self._gathered_product(grad, weight, keep=True)
        grad_weight = whole.t().matmul(x)
        self.carrier.give_back(whole)
        return grad_x, grad_weight

    def _gathered_product(
        self, shard: torch.Tensor, b: torch.Tensor, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``all_gather(shard) @ b``, and with ``keep`` what was gathered, to be given back."""
        whole = self.carrier.gather(shard).result()
        y = self._like_all(shard, b)
        gemm_into(y, whole, b)
        if not keep:
            self.carrier.give_back(whole)
        return y, whole

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        full = self.carrier.take(a, a.shape[0], b.shape[1])
        gemm_into(full, a, b)
        result = self.carrier.scatter(full, self._like_own(a, b)).result()
        self.carrier.give_back(full)
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
        gather = self.carrier.gather(x).begun()
        full = self.carrier.take(grad, grad.shape[0], weight.shape[1])
        gemm_into(full, grad, weight)
        whole = gather.result()
        scatter = self.carrier.scatter(full, torch.empty_like(x)).begun()
        grad_weight = grad.t().matmul(whole)
        grad_x = scatter.result()
        self.carrier.give_back(full, whole)
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

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        gather = self.carrier.gather(x)
        grad_x, under_way = self._begin_scatters(grad, weight)
        whole = gather.result()
        grad_weight = grad.t().matmul(whole)
        self.carrier.give_back(whole)
        self._finish_scatters(under_way)
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
            self.carrier.give_back(product, part)
        return y, whole

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, under_way = self._begin_scatters(a, b)
        self._finish_scatters(under_way)
        return y

    def _runs(self, rows: int) -> list[slice]:
        return [slice(start, stop) for start, stop in pairwise(split(rows, self._slices))]

    def _gathered(self, shard: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """``(rows of a shard, these rows of all shards)``, one slice after the other."""
        runs = self._runs(shard.shape[0])
        # Where several would share the link, only the next one is under way.
        ahead = len(runs) if self.carrier.in_order else 1
        under_way = [self.carrier.gather(shard[run]) for run in runs[:ahead]]
        for number, run in enumerate(runs):
            part = under_way[number].result()
            if len(under_way) < len(runs):
                under_way.append(self.carrier.gather(shard[runs[len(under_way)]]))
            yield run, part

    def _begin_scatters(
        self, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[Pending, torch.Tensor]]]:
        y, take = self._like_own(a, b), self.carrier.take
        under_way: list[tuple[Pending, torch.Tensor]] = []
        for run in self._runs(y.shape[0]):
            rows = take(a, self.carrier.size * (run.stop - run.start), a.shape[1])
            self._blocks(rows).copy_(self._blocks(a)[:, run])
            full = take(a, rows.shape[0], b.shape[1])
            gemm_into(full, rows, b)
            self.carrier.give_back(rows)
            if not self.carrier.in_order:
                self._finish_scatters(under_way)
            under_way.append((self.carrier.scatter(full, y[run]), full))
        return y, under_way

    def _finish_scatters(self, under_way: list[tuple[Pending, torch.Tensor]]) -> None:
        while under_way:
            scatter, full = under_way.pop(0)
            scatter.result()
            self.carrier.give_back(full)


class Ring(Blocking):
    """Over neighbours only: blocks, or sums, are passed on around a ring, behind a GEMM each.

    On a full mesh one of ``n - 1`` links is in use.  ``r`` is this rank; the own block is the first
    when gathering and the last when scattering, as in the product::

        gathering   compute  | own r     | block r-1 | block r-2 |
                    links    | block r-1 | block r-2 |           |

        scattering  compute  | for r+1   | for r+2   | own r     |
                    links    |           | for r+1   | for r+2   |

    Blocks go up, to ``r + 1``.  Sums go down, to ``r - 1``, so that the partials of block r are
    added in the order ``r-1, r-2, ..., r+1``, the own one last: the bits of the direct exchange and
    of gloo's reduce-scatter.

    In the column-parallel backward the input goes up while the sums of dx go down.  Weight
    gradients need all rows and are one GEMM.
    """

    carrier: DirectExchange

    def __init__(self, carrier: DirectExchange) -> None:
        super().__init__(carrier)
        self._up = (carrier.rank + 1) % carrier.size
        self._down = (carrier.rank - 1) % carrier.size

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        whole, arrivals = self._whole(x)
        grad_x = torch.empty_like(x)
        gathering = self._passed_on(x, arrivals)
        for _ in zip(gathering, self._summed(grad, weight, grad_x), strict=True):
            pass
        grad_weight = grad.t().matmul(whole)
        self.carrier.give_back(whole)
        return grad_x, grad_weight

    def _gathered_product(
        self, shard: torch.Tensor, b: torch.Tensor, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = self._like_all(shard, b)
        whole, arrivals = self._whole(shard) if keep else (shard, self._two(shard))
        for rank, block in self._passed_on(shard, arrivals):
            gemm_into(self._blocks(y)[rank], block, b)
        if not keep:
            self.carrier.give_back(*arrivals)
        return y, whole

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = self._like_own(a, b)
        for _ in self._summed(a, b, out):
            pass
        return out

    def _two(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the block that is passed on and for the one after it, if there is one."""
        return [
            self.carrier.take(block, *block.shape) for _ in range(min(2, self.carrier.size - 1))
        ]

    def _whole(self, shard: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory for all blocks, the own one in it, and where the others arrive, one by one."""
        rank, size = self.carrier.rank, self.carrier.size
        whole = self.carrier.take(shard, size * shard.shape[0], shard.shape[1])
        blocks = self._blocks(whole)
        blocks[rank].copy_(shard)
        return whole, [blocks[(rank - step) % size] for step in range(1, size)]

    def _passed_on(
        self, shard: torch.Tensor, arrivals: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """``(rank, its block)``, the own one first; while one is used the next is on its way.

        Args:
            arrivals: where blocks arrive, in turns.
        """
        rank, size = self.carrier.rank, self.carrier.size
        block = shard
        for step in range(size - 1):
            into = arrivals[step % len(arrivals)]
            arriving = self.carrier.swap(block, self._up, into, self._down)
            yield (rank - step) % size, block
            block = arriving.result()
        yield (rank + 1) % size, block

    def _summed(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Iterator[None]:
        """Reduce-scatter ``a @ b`` into ``out``, a GEMM per step, the own block's in the last."""
        rank, size = self.carrier.rank, self.carrier.size
        blocks, made = self._blocks(a), self._two(out)
        arrived, under_way = self.carrier.take(out, *out.shape), None
        for step in range(1, size + 1):
            total = made[step % len(made)] if step < size else out
            gemm_into(total, blocks[(rank + step) % size], b)
            if under_way is not None:
                total.add_(under_way.result())
            if step < size:
                under_way = self.carrier.swap(total, self._down, arrived, self._up)
            yield
        self.carrier.give_back(*made, arrived)


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
        runs = AttentionRuns(q, k, v, AttentionMask(causal=True), None, keep=True)
        for run in rows:
            runs.forward(run)
        tensors, ctx.state = runs.saved()
        ctx.save_for_backward(*tensors)
        ctx.rows = rows
        return runs.attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        runs = AttentionRuns.again(ctx.saved_tensors, ctx.state)
        grad = grad.contiguous()
        for run in ctx.rows:
            runs.backward(grad[run], run)
        return *runs.gradients(), None
