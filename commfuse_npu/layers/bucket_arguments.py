"""What exchanges of buckets ask of their arguments."""

from __future__ import annotations

import torch

__all__ = ["check_bucket", "check_fractions"]


def check_bucket(name: str, bucket: torch.Tensor, size: int) -> None:
    if bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(
            f"{name}: the bucket has shape {tuple(bucket.shape)} and strides {bucket.stride()}; it "
            "has to be one contiguous dimension; pass the flat buffer or a run of it"
        )
    elements = bucket.numel()
    if elements % size:
        raise ValueError(
            f"{name}: {elements} elements are not divisible by the group size {size}; pad the "
            f"bucket to {elements + -elements % size}"
        )


def check_fractions(
    name: str,
    bucket: torch.Tensor,
    average: bool,
    scale: float,
    reduce_dtype: torch.dtype | None,
) -> None:
    asked = [
        what
        for what, wanted in (
            ("an average", average),
            (f"scale {scale}", scale != 1.0),
            (f"reduce_dtype {reduce_dtype}", reduce_dtype is not None),
        )
        if wanted
    ]
    if asked and not bucket.dtype.is_floating_point:
        raise TypeError(
            f"{name}: the bucket is {bucket.dtype}, which cannot hold the result of "
            f"{' and '.join(asked)}; use a floating-point dtype, or a sum only"
        )
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise TypeError(f"{name}: reduce_dtype is {reduce_dtype}; it has to be floating-point")
