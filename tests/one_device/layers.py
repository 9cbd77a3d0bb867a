"""A column- and a row-parallel layer, forward and backward: what the tests run alone."""

from __future__ import annotations

from typing import Any

import torch

from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.reference import plain_all_gather_linear, plain_linear_reduce_scatter
from commfuse_npu.runtime.transport import Transport


def leaf(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


def layers(link: Transport, options: LinearOptions, *, fused: bool) -> list[torch.Tensor]:
    """Two micro-batches: outputs, and the gradients of input and weights."""
    found = []
    for batch in range(2):
        x, one, other = leaf(2 * link.rank + batch, 8, 16), leaf(1, 24, 16), leaf(2, 16, 24)
        if fused:
            hidden = all_gather_linear(x, one, transport=link, options=options)
            out = linear_reduce_scatter(hidden, other, transport=link, options=options)
        else:
            plain: dict[str, Any] = {"group": link.group, "options": options, "same_gemms": True}
            hidden = plain_all_gather_linear(x, one, **plain)
            out = plain_linear_reduce_scatter(hidden, other, **plain)
        out.backward(leaf(9 + 2 * link.rank + batch, *out.shape).detach())
        # As whoever reads them next gets them.
        found += [tensor.detach().clone() for tensor in (out, x.grad, one.grad, other.grad)]
    return found
