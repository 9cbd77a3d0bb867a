"""Attention masks in two forms: arguments of an op, and a boolean matrix of visible keys."""

from itertools import accumulate, cycle, takewhile
from typing import Any

import torch

from commfuse_npu.ops import Documents

LENGTHS = {
    "documents": (5, 1, 1, 7, 2, 3),
    "many documents": (1, 1, 2),
    "long documents": (11, 2),
}
"""Lengths of successive documents, repeated until a sample is full."""

MASKS = (*LENGTHS, "one document")
"""All masks except causal and full."""


def ends_of(kind: str, length: int, batch: int) -> list[int]:
    """Cumulative ends of documents; sample b starts with the b-th length."""
    bounds: list[int] = []
    for sample in range(batch):
        lengths = LENGTHS.get(kind, (length,))
        turned = lengths[sample % len(lengths) :] + lengths[: sample % len(lengths)]
        ends = takewhile(lambda end: end < length, accumulate(cycle(turned)))
        bounds += [sample * length + end for end in (*ends, length)]
    return bounds


def mask_arguments(kind: str, length: int, batch: int) -> dict[str, Any]:
    """The mask arguments of an op."""
    if kind in ("causal", "full"):
        return {"causal": kind == "causal"}
    return {"causal": True, "documents": Documents(ends_of(kind, length, batch), length, batch)}


def seen(kind: str, length: int, batch: int) -> torch.Tensor:
    """``[B, 1, S, S]``, True where a query (third dimension) sees a key (fourth)."""
    causal = torch.ones(batch, 1, length, length, dtype=torch.bool).tril()
    if kind == "causal":
        return causal
    if kind == "full":
        return torch.ones_like(causal)
    number = torch.zeros(batch * length, dtype=torch.int64)
    for end in ends_of(kind, length, batch):
        number[end:] += 1
    by_sample = number.view(batch, 1, 1, length)
    return causal & (by_sample == by_sample.mT)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shown: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """``[S, B, A, D]``: softmax over the keys in ``shown``."""
    heads = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (q, k, v))
    q, k, v = (x.permute(1, 2, 0, 3) for x in heads)
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    return (scores.masked_fill(~shown, -torch.inf).softmax(-1) @ v).permute(2, 0, 1, 3)
