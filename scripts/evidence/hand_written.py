"""Tensor-parallel linear layers written out by hand: what a fused op should cost its host.

One function per direction, for one fixed case: every loop is spelled out, scratch is allocated once
and handed in, nothing is checked, nothing can fail in words.  GEMMs, sums, copies, posts and waits
are those of the programs of :mod:`commfuse_npu.plan.rules`, in their order, by the same calls of
torch; only the slices and the calls are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Setting", "column_layer", "row_layer"]


@dataclass(frozen=True)
class Setting:
    """A case.

    Attributes:
        lanes: a group per distance 1, ..., n-1.
        rank, size: place in the group.
        rows: of a block.
        chunks: equal ones.
        scratch: matrices by name, allocated once.
    """

    lanes: list[dist.ProcessGroup]
    rank: int
    size: int
    rows: int
    chunks: int
    scratch: dict[str, torch.Tensor]


def _swap(s: Setting, distance: int, out: torch.Tensor, into: torch.Tensor) -> list[Any]:
    lane = s.lanes[distance - 1]
    works: list[Any] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, out, (s.rank + distance) % s.size, lane),
            dist.P2POp(dist.irecv, into, (s.rank - distance) % s.size, lane),
        ]
    )
    return works


def _wait(posted: list[list[Any]]) -> None:
    for works in posted:
        for work in works:
            work.wait()


def _sum(out: torch.Tensor, stack: torch.Tensor, own: torch.Tensor) -> None:
    total, *more = stack.chunk(stack.shape[0] // own.shape[0])
    for part in more:
        total.add_(part)
    torch.add(total, own, out=out)


def _spread(s: Setting, out: torch.Tensor, stack: torch.Tensor, first: int, length: int) -> None:
    """A chunk of all peers into their blocks."""
    blocks = out.unflatten(0, (s.size, s.rows))[:, first : first + length]
    pieces = stack.unflatten(0, (s.size - 1, length))
    if s.rank:
        blocks[: s.rank].copy_(pieces[: s.rank])
    if s.rank < s.size - 1:
        blocks[s.rank + 1 :].copy_(pieces[s.rank :])


def _gather_gemm(
    s: Setting, shard: torch.Tensor, weight: torch.Tensor, filled: torch.Tensor | None
) -> torch.Tensor:
    n, r, rows = s.size, s.rank, s.rows
    out = shard.new_empty((n * rows, weight.shape[1]))
    posted: list[list[Any]] = []
    if s.chunks == 1:
        whole = s.scratch["whole"] if filled is None else filled
        for distance in range(1, n):
            source = (r - distance) % n
            into = whole[source * rows : (source + 1) * rows]
            posted.append(_swap(s, distance, shard, into))
        torch.mm(shard, weight, out=out[r * rows : (r + 1) * rows])
        if filled is not None:
            filled[r * rows : (r + 1) * rows].copy_(shard)
        if r:
            _wait(posted[:r])
            torch.mm(whole[: r * rows], weight, out=out[: r * rows])
        if r < n - 1:
            _wait(posted[r:])
            torch.mm(whole[(r + 1) * rows :], weight, out=out[(r + 1) * rows :])
        return out
    length = rows // s.chunks
    for chunk in range(s.chunks):
        staged = s.scratch[f"staged {chunk}"]
        for distance in range(1, n):
            source = (r - distance) % n
            slot = source if source < r else source - 1
            into = staged[slot * length : (slot + 1) * length]
            piece = shard[chunk * length : (chunk + 1) * length]
            posted.append(_swap(s, distance, piece, into))
    torch.mm(shard, weight, out=out[r * rows : (r + 1) * rows])
    if filled is not None:
        filled[r * rows : (r + 1) * rows].copy_(shard)
    for chunk in range(s.chunks):
        staged, result = s.scratch[f"staged {chunk}"], s.scratch["result"]
        _wait(posted[chunk * (n - 1) : (chunk + 1) * (n - 1)])
        if filled is not None:
            _spread(s, filled, staged, chunk * length, length)
        torch.mm(staged, weight, out=result)
        _spread(s, out, result, chunk * length, length)
    return out


def _gemm_scatter(s: Setting, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    n, r, rows = s.size, s.rank, s.rows
    width = weight.shape[1] // s.chunks
    out = a.new_empty((rows, weight.shape[1]))
    posted: list[list[list[Any]]] = [[] for _ in range(s.chunks)]

    def add(chunk: int) -> None:
        made, stack = s.scratch[f"made {chunk % 2}"], s.scratch[f"stack {chunk % 2}"]
        _wait(posted[chunk])
        columns = out[:, chunk * width : (chunk + 1) * width]
        _sum(columns, stack, made[r * rows : (r + 1) * rows])

    for chunk in range(s.chunks):
        if chunk >= 2:
            add(chunk - 2)
        made, stack = s.scratch[f"made {chunk % 2}"], s.scratch[f"stack {chunk % 2}"]
        factor = weight[:, chunk * width : (chunk + 1) * width]
        last = chunk == s.chunks - 1
        if not last:
            torch.mm(a, factor, out=made)
        for distance in range(1, n):
            target = (r + distance) % n
            if last and distance == 1 and r < n - 1:
                torch.mm(a[(r + 1) * rows :], factor, out=made[(r + 1) * rows :])
            if last and target == 0:
                torch.mm(a[: r * rows], factor, out=made[: r * rows])
            piece = made[target * rows : (target + 1) * rows]
            into = stack[(distance - 1) * rows : distance * rows]
            posted[chunk].append(_swap(s, distance, piece, into))
        if last:
            own = slice(r * rows, (r + 1) * rows)
            torch.mm(a[own], factor, out=made[own])
    for chunk in range(max(0, s.chunks - 2), s.chunks):
        add(chunk)
    return out


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, s: Setting) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.setting = weight, s
        return _gather_gemm(s, x, weight.t(), None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        s, weight = ctx.setting, ctx.weight
        n, r, rows = s.size, s.rank, s.rows
        whole, width = s.scratch["whole"], weight.shape[1] // s.chunks
        gathered, scattered = [], []
        for distance in range(1, n):
            source = (r - distance) % n
            into = whole[source * rows : (source + 1) * rows]
            gathered.append(_swap(s, distance, x, into))
        grad_x = torch.empty_like(x)
        for chunk in range(s.chunks):
            made, stack = s.scratch[f"dgrad {chunk}"], s.scratch[f"sums {chunk}"]
            torch.mm(grad, weight[:, chunk * width : (chunk + 1) * width], out=made)
            posted = []
            for distance in range(1, n):
                target = (r + distance) % n
                piece = made[target * rows : (target + 1) * rows]
                into = stack[(distance - 1) * rows : distance * rows]
                posted.append(_swap(s, distance, piece, into))
            scattered.append(posted)
        whole[r * rows : (r + 1) * rows].copy_(x)
        _wait(gathered)
        grad_weight = grad.t().matmul(whole)
        for chunk in range(s.chunks):
            _wait(scattered[chunk])
            columns = grad_x[:, chunk * width : (chunk + 1) * width]
            own = s.scratch[f"dgrad {chunk}"][r * rows : (r + 1) * rows]
            _sum(columns, s.scratch[f"sums {chunk}"], own)
        return grad_x, grad_weight, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, s: Setting) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.setting = weight, s
        return _gemm_scatter(s, x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        s = ctx.setting
        whole = s.scratch["gradient"]
        grad_x = _gather_gemm(s, grad, ctx.weight, whole)
        return grad_x, whole.t().matmul(x), None


def _take(s: Setting, shapes: dict[str, tuple[int, int]]) -> None:
    for name, shape in shapes.items():
        s.scratch[name] = torch.empty(shape)


def column_layer(
    s: Setting, x: torch.Tensor, weight: torch.Tensor
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor, Setting]]:
    """The function and its arguments for ``[s, I] -> [S, O]``."""
    n, rows, (outputs, inputs) = s.size, s.rows, weight.shape
    length, width = rows // s.chunks, inputs // s.chunks
    shapes = {"whole": (n * rows, inputs), "result": ((n - 1) * length, outputs)}
    for chunk in range(s.chunks):
        shapes[f"staged {chunk}"] = ((n - 1) * length, inputs)
        shapes[f"dgrad {chunk}"] = (n * rows, width)
        shapes[f"sums {chunk}"] = ((n - 1) * rows, width)
    _take(s, shapes)
    return _Column, (x, weight, s)


def row_layer(
    s: Setting, x: torch.Tensor, weight: torch.Tensor
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor, Setting]]:
    """The function and its arguments for ``[S, I] -> [s, O]``."""
    n, rows, (outputs, inputs) = s.size, s.rows, weight.shape
    length, width = rows // s.chunks, outputs // s.chunks
    shapes = {"gradient": (n * rows, outputs), "result": ((n - 1) * length, inputs)}
    for chunk in range(s.chunks):
        shapes[f"staged {chunk}"] = ((n - 1) * length, outputs)
        shapes[f"made {chunk % 2}"] = (n * rows, width)
        shapes[f"stack {chunk % 2}"] = ((n - 1) * rows, width)
    _take(s, shapes)
    return _Row, (x, weight, s)
