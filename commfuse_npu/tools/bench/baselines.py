"""Baselines for comparison: tensor-parallel linear layers, blocking, in slices, or around a ring.

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

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.plan import split
from commfuse_npu.tools.bench.carriers import Carrier, DirectExchange, Pending

__all__ = ["Blocking", "Grads", "MegatronOrder", "Ring", "Sliced", "in_order"]

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
        # If several collectives would share the link, only the next one is started.
        ahead = len(runs) if self.carrier.in_order else 1
        pending = [self.carrier.gather(shard[run]) for run in runs[:ahead]]
        for number, run in enumerate(runs):
            part = pending[number].result()
            if len(pending) < len(runs):
                pending.append(self.carrier.gather(shard[runs[len(pending)]]))
            yield run, part

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
            if not self.carrier.in_order:
                self._finish_scatters(pending)
            pending.append((self.carrier.scatter(full, y[run]), full))
        return y, pending

    def _finish_scatters(self, under_way: list[tuple[Pending, torch.Tensor]]) -> None:
        while under_way:
            scatter, full = under_way.pop(0)
            scatter.result()
            self.carrier.release(full)


class Ring(Blocking):
    """Exchanges with neighbors only: blocks or sums travel around a ring, each behind a GEMM.

    On a full mesh this uses one of ``n - 1`` links.  ``r`` is this rank.  As in the fused ops, the
    own block comes first when gathering and last when scattering::

        gathering   compute  | own r     | block r-1 | block r-2 |
                    links    | block r-1 | block r-2 |           |

        scattering  compute  | for r+1   | for r+2   | own r     |
                    links    |           | for r+1   | for r+2   |

    Blocks are sent up, to ``r + 1``.  Sums are sent down, to ``r - 1``, so that the partials of
    block r are added in the order ``r-1, r-2, ..., r+1``, the own one last: the same bits as the
    direct exchange and gloo's reduce-scatter.

    In the column-parallel backward the input is sent up while the sums of dx are sent down.  Weight
    gradients need all rows and are computed by one GEMM.
    """

    carrier: DirectExchange

    def __init__(self, carrier: DirectExchange) -> None:
        super().__init__(carrier)
        self._up = (carrier.rank + 1) % carrier.size
        self._down = (carrier.rank - 1) % carrier.size

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        whole, arrivals = self._whole(x)
        grad_x = torch.empty_like(x)
        gathering = self._ring_blocks(x, arrivals)
        for _ in zip(gathering, self._summed(grad, weight, grad_x), strict=True):
            pass
        grad_weight = grad.t().matmul(whole)
        self.carrier.release(whole)
        return grad_x, grad_weight

    def _gathered_product(
        self, shard: torch.Tensor, b: torch.Tensor, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = self._like_all(shard, b)
        whole, arrivals = self._whole(shard) if keep else (shard, self._double_buffer(shard))
        for rank, block in self._ring_blocks(shard, arrivals):
            gemm_into(self._blocks(y)[rank], block, b)
        if not keep:
            self.carrier.release(*arrivals)
        return y, whole

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = self._like_own(a, b)
        for _ in self._summed(a, b, out):
            pass
        return out

    def _double_buffer(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Buffers for the block that is passed on and for the next one, if there is one."""
        return [
            self.carrier.take(block, *block.shape) for _ in range(min(2, self.carrier.size - 1))
        ]

    def _whole(self, shard: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A buffer for all blocks, with the own one copied in, and its parts for the others."""
        rank, size = self.carrier.rank, self.carrier.size
        whole = self.carrier.take(shard, size * shard.shape[0], shard.shape[1])
        blocks = self._blocks(whole)
        blocks[rank].copy_(shard)
        return whole, [blocks[(rank - step) % size] for step in range(1, size)]

    def _ring_blocks(
        self, shard: torch.Tensor, arrivals: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(rank, its block)``, the own one first; the next arrives while one is used.

        Args:
            arrivals: buffers for arriving blocks, used in turn.
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
        """Reduce-scatter ``a @ b`` into ``out``: one GEMM per step, the own block's last."""
        rank, size = self.carrier.rank, self.carrier.size
        blocks, totals = self._blocks(a), self._double_buffer(out)
        arrived, pending = self.carrier.take(out, *out.shape), None
        for step in range(1, size + 1):
            total = totals[step % len(totals)] if step < size else out
            gemm_into(total, blocks[(rank + step) % size], b)
            if pending is not None:
                total.add_(pending.result())
            if step < size:
                pending = self.carrier.swap(total, self._down, arrived, self._up)
            yield
        self.carrier.release(*totals, arrived)


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
        runs = AttentionRuns(q, k, v, causal=True, keep=True)
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
