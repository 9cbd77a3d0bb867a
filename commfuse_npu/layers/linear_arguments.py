"""Checks of the arguments of every op, and what autocast makes of them."""

from __future__ import annotations

import math

import torch

from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport

__all__ = [
    "autocast",
    "check_and_cast",
    "check_device",
    "check_divisible",
    "check_given",
    "check_sequence",
    "check_transport",
    "compute_dtype",
    "rows_of",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_and_cast(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transport: Transport | CollectiveTransport,
    options: LinearOptions,
    *,
    shards: int = 1,
    head_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Refuse what cannot work before any rank waits for another, and cast the rest.

    A program that met two dtypes would fail with transfers under way, which breaks the transport.
    So checks and cast are one function, which every op with a weight calls first.

    Args:
        x: ``[S, ..., I]``.
        weight: ``[O, I * head_groups]``.
        shards: number of shards of the rows of the weight; ``weight`` is one, the bias is whole.
        head_groups: how often ``I`` features stand side by side in the columns of the weight.

    Returns:
        ``x``, ``weight`` and ``bias``, of one dtype.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit each other.
    """
    check_given(name, transport, options)
    if weight.dim() != 2 or x.dim() < 2:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; they have to "
            "be [S, ..., I] and [O, I]"
        )
    if head_groups > 1 and weight.shape[1] != head_groups * x.shape[-1]:
        raise ValueError(
            f"{name}: each of {head_groups} ranks has {x.shape[-1]} features of its heads, the "
            f"weight takes {weight.shape[1]} in all; its shape {tuple(weight.shape)} has to be "
            f"[H, {head_groups * x.shape[-1]}]"
        )
    if x.shape[-1] != weight.shape[1] and head_groups == 1:
        raise ValueError(
            f"{name}: x has {x.shape[-1]} features, the weight takes {weight.shape[1]}; its shape "
            f"{tuple(weight.shape)} is [O, I]"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0] * shards,):
        why = f", that of all {shards} shards of {weight.shape[0]} rows: every rank has it whole"
        raise ValueError(
            f"{name}: the bias has shape {tuple(bias.shape)}; it has to be "
            f"({weight.shape[0] * shards},){why if shards > 1 else ''}"
        )
    if x.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"{name}: x is {x.dtype}; choose one of {names}")
    check_device(name, "x", x, transport)
    for other, what in ((weight, "weight"), (bias, "bias")):
        if other is None:
            continue
        if other.device != x.device:
            raise ValueError(
                f"{name}: x is on {x.device}, the {what} on {other.device}; move one of them"
            )
        if other.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name}: x is {x.dtype}, the {what} {other.dtype}; cast one of them")
    if options.main_grad and torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{name}: main_grad under autocast would accumulate for a copy of the weight; keep "
            "weights in the compute dtype, or turn one of the two off"
        )
    return autocast(x, weight, bias)


def check_given(name: str, transport: object, options: object) -> None:
    """Refuse what is easily mistaken for them.

    Raises:
        TypeError: a group for a transport, a mapping for options.
    """
    check_transport(name, transport)
    if not isinstance(options, LinearOptions):
        raise TypeError(
            f"{name}: options is a {type(options).__name__}; pass LinearOptions(...), as "
            "LinearOptions(Schedule(chunks=2))"
        )


def check_transport(name: str, transport: object) -> None:
    """Refuse the group itself.

    Raises:
        TypeError: it is no transport.
    """
    if not isinstance(transport, Transport | CollectiveTransport):
        raise TypeError(
            f"{name}: transport is a {type(transport).__name__}; pass what "
            "Transport.create(group) returned on every rank"
        )


def check_device(
    name: str, what: str, x: torch.Tensor, transport: Transport | CollectiveTransport
) -> None:
    """The group of a transport transfers tensors of one kind of device.

    Raises:
        ValueError: ``x`` is on another one.
    """
    if x.device.type != transport.device_type:
        raise ValueError(
            f"{name}: {what} is on {x.device}, the group transfers {transport.device_type} "
            "tensors; move it there"
        )


def check_divisible(name: str, x: torch.Tensor, size: int) -> None:
    check_sequence(name, x.shape[0], size, ", or use linear_all_reduce")


def check_sequence(name: str, rows: int, size: int, instead: str = "") -> None:
    """The whole sequence has to be cut into one block per rank.

    Raises:
        ValueError: it cannot.
    """
    if rows % size:
        raise ValueError(
            f"{name}: sequence length {rows} is not divisible by the group size {size}; pad it to "
            f"{-(-rows // size) * size}{instead}"
        )


def autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What autocast does for ``torch.nn.functional.linear``."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = compute_dtype(x)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """That of autocast, where it is enabled for the device of ``x``, else that of ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rows_of(x: torch.Tensor) -> int:
    """``s * B`` rows of a GEMM in a tensor ``[s, B, H]``."""
    return math.prod(x.shape[:-1])
