"""Calls in which one rank differs from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from commfuse_npu.ops import (
    BucketOptions,
    Buckets,
    LinearOptions,
    all_gather_linear,
    linear_all_to_all,
    linear_reduce_scatter,
)
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport

__all__ = ["MISMATCHES"]

_SIX = 6  # rows; of groups of 2 and 3


def _layer(rows: int = _SIX, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    return torch.ones(rows, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype)


def _shape(odd: bool, transport: Transport) -> None:
    all_gather_linear(*_layer(_SIX + odd), transport=transport)


def _dtype(odd: bool, transport: Transport) -> None:
    dtype = torch.bfloat16 if odd else torch.float32
    all_gather_linear(*_layer(dtype=dtype), transport=transport)


def _operation(odd: bool, transport: Transport) -> None:
    op = linear_reduce_scatter if odd else all_gather_linear
    op(*_layer(), transport=transport)


def _schedule(odd: bool, transport: Transport) -> None:
    options = LinearOptions(Schedule(chunks=1 + odd))
    all_gather_linear(*_layer(), transport=transport, options=options)


def _wgrad(odd: bool, transport: Transport) -> None:
    options = LinearOptions(wgrad="blocks" if odd else "whole")
    linear_reduce_scatter(*_layer(), transport=transport, options=options)


def _reduce_dtype(odd: bool, transport: Transport) -> None:
    options = LinearOptions(reduce_dtype=torch.float32 if odd else None)
    linear_reduce_scatter(*_layer(dtype=torch.bfloat16), transport=transport, options=options)


def _requires_grad(odd: bool, transport: Transport) -> None:
    x, weight = _layer()
    y = all_gather_linear(x.requires_grad_(), weight.requires_grad_(not odd), transport=transport)
    y.sum().backward()


def _head_rows(odd: bool, transport: Transport) -> None:
    size = transport.size
    rows = [[slice(rank, rank + 1)] for rank in range(size)]
    if odd:
        rows.reverse()
    linear_all_to_all(torch.ones(_SIX, 4), torch.ones(size, 4), transport=transport, rows=rows)


def _bucket(odd: bool, transport: Transport) -> None:
    buckets = Buckets(transport, BucketOptions(Schedule()))
    buckets.reduce_scatter(torch.ones((_SIX + odd) * transport.size)).wait()


def _nothing(odd: bool, transport: Transport) -> None:
    all_gather_linear(*_layer(0 if odd else _SIX), transport=transport)


def _left_out(odd: bool, transport: Transport) -> None:
    """Both shapes were compared before; one rank takes the other one."""
    for rows in (_SIX, 2 * _SIX):
        all_gather_linear(*_layer(rows), transport=transport)
    all_gather_linear(*_layer(2 * _SIX if odd else _SIX), transport=transport)


def _lanes(odd: bool, transport: Transport) -> None:
    Transport.create(lanes=2 + odd, timeout=transport.timeout)


MISMATCHES: dict[str, Callable[[bool, Transport], None]] = {
    "shape": _shape,
    "dtype": _dtype,
    "operation": _operation,
    "schedule": _schedule,
    "wgrad option": _wgrad,
    "reduce_dtype option": _reduce_dtype,
    "requires_grad": _requires_grad,
    "rows of the heads": _head_rows,
    "size of a bucket": _bucket,
    "no rows": _nothing,
    "shapes mixed up, both known": _left_out,
    "number of lanes": _lanes,
}
"""``call(odd, transport)``: every rank calls it; ``odd`` on the one that differs."""
