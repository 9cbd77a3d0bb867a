"""Which tensors HCCL takes (A2 and A3, as listed in its documentation)."""

from __future__ import annotations

import torch

from tests.emulator.errors import RuleError

MOVED = frozenset(
    {
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
    }
)
"""What transfers and collectives that only move data take."""

REDUCED = frozenset(
    {
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.bfloat16,
    }
)
"""What is added up: no fp64 and no unsigned numbers."""


def check(what: str, *tensors: torch.Tensor, reduced: bool = False) -> None:
    """Raise :class:`RuleError` for a tensor that HCCL does not take."""
    allowed = REDUCED if reduced else MOVED
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise RuleError(
                f"{what}: the tensor is on {tensor.device}; this emulation of HCCL has its "
                "tensors on the CPU"
            )
        if tensor.dtype not in allowed:
            names = ", ".join(sorted(short(dtype) for dtype in allowed))
            raise RuleError(
                f"{what}: HCCL does not {'add up' if reduced else 'transfer'} "
                f"{short(tensor.dtype)}; cast it to one of {names}"
            )
        if not tensor.is_contiguous():
            raise RuleError(
                f"{what}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "is not contiguous; pass tensor.contiguous()"
            )


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
