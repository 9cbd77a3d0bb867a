"""Masks of attention, twice: as an op takes them, and as a plain matrix of what a query sees."""

from __future__ import annotations

from itertools import accumulate, cycle, takewhile
from typing import Any

import torch

from commfuse_npu.ops import Documents

LENGTHS = {
    "documents": (5, 1, 1, 7, 2, 3),
    "many documents": (1, 1, 2),
    "long documents": (11, 2),
}
"""Of documents one after the other, over and over until a sample is full."""

MASKS = (*LENGTHS, "one document", "hidden", "hidden and causal")
"""What there is besides causal and full."""


def ends_of(kind: str, length: int, batch: int) -> list[int]:
    """Cumulative ends of documents; those of sample b begin with the b-th length."""
    found: list[int] = []
    for sample in range(batch):
        lengths = LENGTHS.get(kind, (length,))
        turned = lengths[sample % len(lengths) :] + lengths[: sample % len(lengths)]
        ends = takewhile(lambda end: end < length, accumulate(cycle(turned)))
        found += [sample * length + end for end in (*ends, length)]
    return found


def _hidden(length: int, batch: int) -> torch.Tensor:
    """Random, with a query that sees nothing."""
    generator = torch.Generator().manual_seed(length)
    hidden = torch.rand(batch, 1, length, length, generator=generator) < 0.4
    hidden[-1:, :, length // 2 : length // 2 + 1] = True
    return hidden


def mask_arguments(kind: str, length: int, batch: int) -> dict[str, Any]:
    """What an op is told."""
    if kind in ("causal", "full"):
        return {"causal": kind == "causal"}
    if kind.startswith("hidden"):
        return {"causal": kind != "hidden", "hidden": _hidden(length, batch)}
    return {"causal": True, "documents": Documents(ends_of(kind, length, batch), length, batch)}


def seen(kind: str, length: int, batch: int) -> torch.Tensor:
    """``[B, 1, S, S]``, True where a query (third dimension) sees a key (fourth)."""
    causal = torch.ones(batch, 1, length, length, dtype=torch.bool).tril()
    if kind == "causal":
        return causal
    if kind == "full":
        return torch.ones_like(causal)
    if kind.startswith("hidden"):
        shown = ~_hidden(length, batch)
        return shown if kind == "hidden" else shown & causal
    number = torch.zeros(batch * length, dtype=torch.int64)
    for end in ends_of(kind, length, batch):
        number[end:] += 1
    of_sample = number.view(batch, 1, 1, length)
    return causal & (of_sample == of_sample.mT)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shown: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """``[S, B, A, D]``: softmax over what ``shown`` lets a query see, zero where it is nothing."""
    heads = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (q, k, v))
    q, k, v = (x.permute(1, 2, 0, 3) for x in heads)
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    # Not -inf: a row of it has no softmax, and no gradient.
    weights = scores.masked_fill(~shown, -1e30).softmax(-1) * shown
    return (weights @ v).permute(2, 0, 1, 3)
