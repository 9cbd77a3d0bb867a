"""A column-, a row-parallel and a fully sharded layer, forward and backward: what runs alone."""

from __future__ import annotations

import torch

from commfuse_npu.ops import (
    LinearOptions,
    ShardedOptions,
    all_gather_linear,
    linear_reduce_scatter,
    sharded_linear,
)
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport


def leaf(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


def layers(link: Transport, options: LinearOptions, *, fused: bool) -> list[torch.Tensor]:
    """Two micro-batches: outputs, and the gradients of input and weights."""
    found, sharded = [], ShardedOptions(options.schedule)
    transport = link if fused else CollectiveTransport(link.group, same_pieces=True)
    for batch in range(2):
        x, one, other = leaf(2 * link.rank + batch, 8, 16), leaf(1, 24, 16), leaf(2, 16, 24)
        shard = leaf(3 + link.rank, 8, 16)
        hidden = all_gather_linear(x, one, transport=transport, options=options)
        out = linear_reduce_scatter(hidden, other, transport=transport, options=options)
        out = sharded_linear(out, shard, transport=transport, options=sharded)
        out.backward(leaf(9 + 2 * link.rank + batch, *out.shape).detach())
        # As whoever reads them next gets them.
        leaves = (x, one, other, shard)
        found += [out.detach().clone(), *(tensor.grad.clone() for tensor in leaves)]
    return found
