"""Unfused attention as the reference of the kernels, and the calls that an operator makes."""

from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from types import ModuleType
from unittest import mock

import torch

from commfuse_npu.ops import attention_runs
from commfuse_npu.ops.attention_runs import AttentionRuns
from tests.attention_masks import MASKS, attention, mask_arguments, seen

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Attention over ``sum(chunks)`` queries, chunk by chunk."""

    heads: tuple[int, int] = (4, 4)
    chunks: tuple[int, ...] = (8,)
    mask: str = "causal"
    """A mask of :mod:`tests.attention_masks`."""
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    batch: int = 2

    def inputs(self) -> Tensors:
        """q, k, v and the gradient of the output; ``[S, B, A, D]`` and ``[S, B, G, D]``."""
        generator, (heads, groups) = torch.Generator().manual_seed(7), self.heads
        shapes = ((sum(self.chunks), self.batch, n, 16) for n in (heads, groups, groups, heads))
        return tuple(torch.randn(s, generator=generator).to(self.dtype) for s in shapes)


def unfused(case: Case) -> Tensors:
    """Output and gradients of q, k, v in fp64, by autograd."""
    q, k, v, grad = (x.double().requires_grad_() for x in case.inputs())
    out = attention(q, k, v, seen(case.mask, q.shape[0], case.batch), case.scale)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def by_chunks(kernels: ModuleType, case: Case) -> Tensors:
    """The same with the kernels, chunk by chunk."""
    q, k, v, grad = case.inputs()
    runs = AttentionRuns(**mask_arguments(case.mask, q.shape[0], case.batch), scale=case.scale)
    with mock.patch.object(attention_runs, "kernels_for", return_value=kernels):
        runs.begin(q, k, v, keep=True)
    bounds = [slice(*bound) for bound in pairwise([0, *accumulate(case.chunks)])]
    out = torch.cat([runs.forward(rows) for rows in bounds])
    runs.resume(runs.saved())
    for rows in reversed(bounds):
        runs.backward(grad[rows], rows)
    return out, *runs.gradients()


def assert_close(found: Tensors, expected: Tensors, dtype: torch.dtype) -> None:
    """Output and gradients are equal up to rounding to ``dtype``."""
    limit = 5e-6 if dtype == torch.float32 else 1e-2
    ours, theirs = ([tensor.double() for tensor in tensors] for tensors in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


CASES = [
    Case(heads, chunks, mask)
    for heads, chunks, mask in product(
        ((4, 4), (4, 2), (4, 1)), ((12,), (5, 4, 3)), ("causal", "full")
    )
]
CASES += [Case((4, 2), (5, 4, 3), dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
CASES += [Case((4, 2), (5, 4, 3), scale=0.5)]
MASKED = [
    Case(heads, chunks, mask, batch=batch)
    for heads, chunks, mask, batch in product(
        ((4, 4), (4, 2)), ((24,), (5, 8, 1, 10)), MASKS, (1, 2)
    )
]
MASKED.append(Case((4, 2), (5, 8, 1, 10), "documents", torch.bfloat16))
"""Packed documents, cut by the borders of chunks."""
