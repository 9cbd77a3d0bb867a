"""The unfused lines which the attention kernels equal, and the way an op calls them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from commfuse_npu.kernels import Kernels

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Attention over ``sum(chunks)`` queries, chunk by chunk."""

    heads: tuple[int, int] = (4, 4)
    chunks: tuple[int, ...] = (8,)
    causal: bool = True
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    longer: int = 0
    """How many keys there are beyond the queries; causal ones come before the first query."""

    def inputs(self) -> Tensors:
        """q, k, v and the gradient of the output; ``[S, B, A, D]`` and ``[S, B, G, D]``."""
        generator = torch.Generator().manual_seed(7)
        queries, (heads, groups) = sum(self.chunks), self.heads

        def random(rows: int, width: int) -> torch.Tensor:
            return torch.randn(rows, 2, width, 16, generator=generator).to(self.dtype)

        keys = queries + self.longer
        return (
            random(queries, heads),
            random(keys, groups),
            random(keys, groups),
            random(queries, heads),
        )


def unfused(case: Case) -> Tensors:
    """Output and gradients of q, k, v in fp64, by autograd."""
    q, k, v, grad = (x.double().requires_grad_() for x in case.inputs())
    repeats = case.heads[0] // case.heads[1]
    keys, values = (x.repeat_interleave(repeats, 2).permute(1, 2, 0, 3) for x in (k, v))
    scores = q.permute(1, 2, 0, 3) @ keys.mT * (case.scale or q.shape[-1] ** -0.5)
    if case.causal:
        last = torch.arange(q.shape[0]).unsqueeze(1) + k.shape[0] - q.shape[0]
        scores = scores.masked_fill(torch.arange(k.shape[0]) > last, -torch.inf)
    out = (scores.softmax(-1) @ values).permute(2, 0, 1, 3)
    out.backward(grad)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def by_chunks(kernels: Kernels, case: Case) -> Tensors:
    """The same by the kernels: forward and backward of each chunk, dK and dV summed in fp32."""
    q, k, v, grad = case.inputs()
    out, grad_q = torch.empty_like(q), torch.empty_like(q)
    sums = [torch.zeros(k.shape), torch.zeros(k.shape)]
    saved = []
    bounds = list(pairwise([0, *accumulate(case.chunks)]))
    for start, stop in bounds:
        seen = slice(0, stop + case.longer if case.causal else None)
        out[start:stop], statistics = kernels.attention_forward(
            q[start:stop], k[seen], v[seen], causal=case.causal, scale=case.scale
        )
        saved.append((slice(start, stop), seen, statistics))
    for rows, seen, statistics in reversed(saved):
        parts = [x[seen] for x in sums]
        grad_q[rows] = kernels.attention_backward(
            grad[rows],
            q[rows],
            k[seen],
            v[seen],
            out[rows],
            statistics,
            *parts,
            causal=case.causal,
            scale=case.scale,
        )
    return out, grad_q, sums[0], sums[1]


def assert_close(found: Tensors, expected: Tensors, dtype: torch.dtype) -> None:
    """Within what rounding to ``dtype`` explains."""
    limit = 5e-6 if dtype == torch.float32 else 1e-2
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = (one.double() - other.double()).abs()
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
