"""The operations in which faults are planted: a forward, a backward, and their plain form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from commfuse_npu import ops, reference
from commfuse_npu.ops import BucketOptions, Buckets, LinearOptions
from commfuse_npu.plan.rules import gather_use
from commfuse_npu.runtime.transport import Transport

__all__ = ["OPERATIONS", "Operation", "UserError"]

_ROWS, _BATCH, _HIDDEN, _HEADS = 24, 2, 48, 12


class UserError(Exception):
    """What the code around the product raises."""


class Operation(Protocol):
    """One operation on this rank; every rank of the group makes its own."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def results(self) -> list[torch.Tensor]:
        """Output and gradients of the last forward and backward."""

    def plain(self) -> list[torch.Tensor]:
        """The same from the plain collectives."""


class _Layer:
    """A differentiable op next to its plain form.

    Args:
        tensors: its inputs and weights, of this rank.
    """

    def __init__(
        self,
        fused: Callable[..., torch.Tensor],
        plain: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._fused, self._plain = fused, plain
        self._tensors = [tensor.requires_grad_() for tensor in tensors]
        self._y: torch.Tensor | None = None

    def forward(self) -> None:
        for tensor in self._tensors:
            tensor.grad = None
        self._y = self._fused(*self._tensors)

    def backward(self) -> None:
        assert self._y is not None
        # Neither ones nor the output: every row of the gradient counts.
        self._y.backward(torch.linspace(-1, 1, self._y.numel()).view(self._y.shape))

    def results(self) -> list[torch.Tensor]:
        assert self._y is not None
        grads = [tensor.grad for tensor in self._tensors if tensor.grad is not None]
        return [self._y.detach().clone(), *(grad.clone() for grad in grads)]

    def plain(self) -> list[torch.Tensor]:
        copies = [tensor.detach().clone() for tensor in self._tensors]
        layer = _Layer(self._plain, self._plain, copies)
        layer.forward()
        layer.backward()
        return layer.results()


class _Buckets:
    """Two gradient buckets under way at once, then the same two as parameters."""

    def __init__(self, transport: Transport, options: LinearOptions) -> None:
        self._transport = transport
        self._buckets = Buckets(transport, BucketOptions(options.schedule))
        draw = torch.Generator().manual_seed(transport.rank)
        length = 2 * _ROWS * transport.size
        self._given = [torch.randn(length, generator=draw) for _ in range(2)]
        self._now: list[torch.Tensor] = []

    def forward(self) -> None:
        self._now = [bucket.clone() for bucket in self._given]
        for handle in [self._buckets.reduce_scatter(bucket) for bucket in self._now]:
            handle.wait()

    def backward(self) -> None:
        for handle in [self._buckets.all_gather(bucket) for bucket in self._now]:
            handle.wait()

    def results(self) -> list[torch.Tensor]:
        return [bucket.clone() for bucket in self._now]

    def plain(self) -> list[torch.Tensor]:
        buckets = [bucket.clone() for bucket in self._given]
        for bucket in buckets:
            reference.plain_reduce_scatter_bucket(bucket, group=self._transport.group)
            reference.plain_all_gather_bucket(bucket, group=self._transport.group)
        return buckets


class _Callback:
    """A program with the user's own work in it."""

    def __init__(self, transport: Transport, options: LinearOptions) -> None:
        self._transport = transport
        self._program = gather_use(transport.place(options.schedule), _ROWS, 2, False)
        self._shard = torch.full((_ROWS, 2), float(transport.rank))
        self._seen = torch.empty(_ROWS * transport.size, 2)

    def forward(self) -> None:
        running = self._transport.begin(self._program, "gather_use", self._shard)
        running.run({"use": self._use}, shard=self._shard)

    def _use(self, piece: torch.Tensor, rows: slice) -> None:
        self._seen[rows] = piece

    def backward(self) -> None:
        pass

    def results(self) -> list[torch.Tensor]:
        return [self._seen.clone()]

    def plain(self) -> list[torch.Tensor]:
        ranks = torch.arange(self._transport.size, dtype=torch.float32)
        return [ranks.repeat_interleave(_ROWS)[:, None].expand(-1, 2)]


def _layer(
    name: str, same: str, shapes: Callable[[int], list[tuple[int, ...]]], **settings: Any
) -> Callable[[Transport, LinearOptions], Operation]:
    """An op of :mod:`commfuse_npu.ops`.

    Args:
        same: the argument with which its plain form cuts the work alike.
        shapes: of its tensors, for a group of so many.
    """

    def make(transport: Transport, options: LinearOptions) -> Operation:
        draw = torch.Generator().manual_seed(transport.rank)
        fused = partial(getattr(ops, name), transport=transport, options=options, **settings)
        plain = partial(
            getattr(reference, f"plain_{name}"),
            group=transport.group,
            options=options,
            **{same: True},
            **settings,
        )
        tensors = [torch.randn(shape, generator=draw) for shape in shapes(transport.size)]
        return _Layer(fused, plain, tensors)

    return make


def _heads(size: int) -> list[tuple[int, ...]]:
    return [(_ROWS, _BATCH, _HEADS // size, 4)] * 3


OPERATIONS: dict[str, Callable[[Transport, LinearOptions], Operation]] = {
    "all_gather_linear": _layer(
        "all_gather_linear",
        "same_gemms",
        lambda n: [(_ROWS, _BATCH, _HIDDEN), (2 * _HIDDEN // n, _HIDDEN)],
    ),
    "linear_reduce_scatter": _layer(
        "linear_reduce_scatter",
        "same_gemms",
        lambda n: [(_ROWS, _BATCH, _HIDDEN // n), (_HIDDEN, _HIDDEN // n)],
    ),
    "attention_linear_reduce_scatter": _layer(
        "attention_linear_reduce_scatter",
        "same_blocks",
        lambda n: [*_heads(n), (_HIDDEN, _HEADS // n * 4)],
        causal=True,
    ),
    "linear_all_to_all": _layer(
        "linear_all_to_all",
        "same_blocks",
        lambda n: [(_ROWS, _BATCH, _HIDDEN), (2 * _HIDDEN, _HIDDEN)],
    ),
    "attention_all_to_all_linear": _layer(
        "attention_all_to_all_linear",
        "same_blocks",
        lambda n: [*_heads(n), (_HIDDEN, _HEADS * 4)],
        causal=True,
    ),
    "Buckets": _Buckets,
    "gather_use": _Callback,
}
"""By name; each made from a transport and options by every rank of the group."""
