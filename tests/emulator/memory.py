"""The bytes of a tensor, past autograd and its version counters, as a device would touch them."""

from __future__ import annotations

import ctypes

import torch

_POISON = 0x7F


def read(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a contiguous tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def write(tensor: torch.Tensor, data: bytes) -> None:
    """Put bytes into a contiguous tensor."""
    if len(data) != tensor.nbytes:
        raise ValueError(f"{len(data)} bytes for a tensor of {tensor.nbytes}")
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))


def poison(tensor: torch.Tensor) -> None:
    """What a receive buffer holds until it was waited for: NaN, or bytes 0x7f in whole numbers."""
    if not tensor.nbytes:
        return
    if tensor.is_floating_point():
        write(tensor, read(torch.full((1,), float("nan"), dtype=tensor.dtype)) * tensor.numel())
    else:
        ctypes.memset(tensor.data_ptr(), _POISON, tensor.nbytes)


def as_tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over a copy of the bytes."""
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
