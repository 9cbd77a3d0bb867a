"""Unfused attention as the reference of the kernels, and the calls that an operator makes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch

from commfuse_npu.ops.attention_runs import keys_of
from tests.attention_masks import MASKS, attention, mask_arguments, seen

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Attention over ``sum(chunks)`` queries, chunk by chunk."""

    heads: tuple[int, int] = (4, 4)
    chunks: tuple[int, ...] = (8,)
    causal: bool = True
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    mask: str | None = None
    """A mask of :mod:`tests.attention_masks`, instead of ``causal``."""
    batch: int = 2
    longer: int = 0
    """Number of keys beyond the queries; if causal, they precede the first query."""

    def inputs(self) -> Tensors:
        """q, k, v and the gradient of the output; ``[S, B, A, D]`` and ``[S, B, G, D]``."""
        generator = torch.Generator().manual_seed(7)
        queries, (heads, groups) = sum(self.chunks), self.heads

        def random(rows: int, width: int) -> torch.Tensor:
            return torch.randn(rows, self.batch, width, 16, generator=generator).to(self.dtype)

        keys = queries + self.longer
        of_keys = random(keys, groups), random(keys, groups)
        return random(queries, heads), *of_keys, random(queries, heads)


def unfused(case: Case) -> Tensors:
    """Output and gradients of q, k, v in fp64, by autograd."""
    q, k, v, grad = (x.double().requires_grad_() for x in case.inputs())
    if case.mask is None:
        visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
        visible = visible.tril(k.shape[0] - q.shape[0]) if case.causal else visible
    else:
        visible = seen(case.mask, q.shape[0], case.batch)
    out = attention(q, k, v, visible, case.scale)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def by_chunks(kernels: ModuleType, case: Case) -> Tensors:
    """The same with the kernels, chunk by chunk; dK and dV are summed in fp32."""
    q, k, v, grad = case.inputs()
    out, grad_q = torch.empty_like(q), torch.empty_like(q)
    sums = [torch.zeros(k.shape), torch.zeros(k.shape)]
    saved = []
    bounds = list(pairwise([0, *accumulate(case.chunks)]))
    mask: dict[str, Any] = {"causal": case.causal}
    if case.mask is not None:
        mask = mask_arguments(case.mask, q.shape[0], case.batch)
    for rows in (slice(*bound) for bound in bounds):
        seen_keys, pieces = keys_of(rows, mask["causal"], mask.get("documents"))
        keys = slice(seen_keys.start, seen_keys.stop and seen_keys.stop + case.longer)
        options = {"causal": mask["causal"], "pieces": pieces, "scale": case.scale}
        out[rows], statistics = kernels.attention_forward(q[rows], k[keys], v[keys], **options)
        saved.append((rows, keys, options, statistics))
    for rows, keys, options, statistics in reversed(saved):
        tensors = grad[rows], q[rows], k[keys], v[keys], out[rows], statistics
        parts = [x[keys] for x in sums]
        grad_q[rows] = kernels.attention_backward(*tensors, *parts, **options)
    return out, grad_q, sums[0], sums[1]


def assert_close(found: Tensors, expected: Tensors, dtype: torch.dtype) -> None:
    """Results are equal up to rounding to ``dtype``."""
    limit = 5e-6 if dtype == torch.float32 else 1e-2
    for name, tensor, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = (tensor.double() - other.double()).abs()
        worst = (error / (1 + other.double().abs())).max().item()
        assert worst < limit, f"{name} is off by {worst:.1e}, more than {limit:.0e}"


CASES = [
    Case(heads=heads, chunks=chunks, causal=causal, longer=longer)
    for heads in ((4, 4), (4, 2), (4, 1))
    for chunks, longer in (((12,), 0), ((5, 4, 3), 0), ((1, 6), 5))
    for causal in (True, False)
]
CASES += [Case((4, 2), (5, 4, 3), dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
CASES += [Case((4, 2), (5, 4, 3), scale=0.5)]
MASKED = [
    Case(heads, chunks, mask=mask, batch=batch)
    for heads in ((4, 4), (4, 2))
    for chunks in ((24,), (5, 8, 1, 10))
    for mask in MASKS
    for batch in (1, 2)
]
MASKED.append(Case((4, 2), (5, 8, 1, 10), dtype=torch.bfloat16, mask="documents"))
"""Packed documents, cut by the borders of chunks."""
