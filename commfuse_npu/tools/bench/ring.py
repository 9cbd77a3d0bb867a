"""Tensor-parallel linear layers over neighbours only: blocks, or sums, are passed on around a ring.

Legend as in :mod:`.baselines`; ``r`` is this rank.  The own block is the first when gathering and
the last when scattering, as in the product, but on a full mesh one of ``n - 1`` links is in use::

    gathering   compute  | own r     | block r-1 | block r-2 |
                links    | block r-1 | block r-2 |           |

    scattering  compute  | for r+1   | for r+2   | own r     |
                links    |           | for r+1   | for r+2   |

Blocks go up, to ``r + 1``.  Sums go down, to ``r - 1``, so that the partials of block r are added
in the order ``r-1, r-2, ..., r+1``, the own one last: the bits of the direct exchange and of gloo's
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from commfuse_npu.kernels import gemm_into
from commfuse_npu.tools.bench.baselines import Blocking, Grads
from commfuse_npu.tools.bench.carriers import DirectExchange

__all__ = ["Ring"]


class Ring(Blocking):
    """Each of the ``n - 1`` steps between neighbours behind a GEMM over one block.

    In the column-parallel backward the input goes up while the sums of dx go down.  Weight
    gradients need all rows and are one GEMM.
    """

    carrier: DirectExchange

    def __init__(self, carrier: DirectExchange) -> None:
        super().__init__(carrier)
        self._up = (carrier.rank + 1) % carrier.size
        self._down = (carrier.rank - 1) % carrier.size

    def gather_gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((self.carrier.size * x.shape[0], weight.shape[0]))
        places = self._two(x)
        for rank, block in self._passed_on(x, places):
            gemm_into(self._blocks(y)[rank], block, weight.t())
        self.carrier.pool.give_back(places)
        return y

    def column_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        whole, places = self._whole(x)
        grad_x = torch.empty_like(x)
        gathering = self._passed_on(x, places)
        for _ in zip(gathering, self._summed(grad, weight, grad_x), strict=True):
            pass
        grad_weight = grad.t().matmul(whole)
        self.carrier.pool.give_back([whole])
        return grad_x, grad_weight

    def row_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Grads:
        whole, places = self._whole(grad)
        grad_x = torch.empty_like(x)
        for rank, block in self._passed_on(grad, places):
            gemm_into(self._blocks(grad_x)[rank], block, weight)
        grad_weight = whole.t().matmul(x)
        self.carrier.pool.give_back([whole])
        return grad_x, grad_weight

    def _scattered_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a.new_empty((a.shape[0] // self.carrier.size, b.shape[1]))
        for _ in self._summed(a, b, out):
            pass
        return out

    def _two(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the block that is passed on and for the one after it, if there is one."""
        return [self._take(block, *block.shape) for _ in range(min(2, self.carrier.size - 1))]

    def _whole(self, shard: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory for all blocks, the own one in it, and where the others arrive, one by one."""
        rank, size = self.carrier.rank, self.carrier.size
        whole = self._take(shard, size * shard.shape[0], shard.shape[1])
        blocks = self._blocks(whole)
        blocks[rank].copy_(shard)
        return whole, [blocks[(rank - step) % size] for step in range(1, size)]

    def _passed_on(
        self, shard: torch.Tensor, places: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """``(rank, its block)``, the own one first; while one is used the next is on its way.

        Args:
            places: where they arrive, in turns.
        """
        rank, size = self.carrier.rank, self.carrier.size
        block = shard
        for step in range(size - 1):
            arriving = self.carrier.swap(block, self._up, places[step % len(places)], self._down)
            yield (rank - step) % size, block
            block = arriving.wait()
        yield (rank + 1) % size, block

    def _summed(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Iterator[None]:
        """Reduce-scatter ``a @ b`` into ``out``, a GEMM per step, the own block's in the last."""
        rank, size = self.carrier.rank, self.carrier.size
        blocks = self._blocks(a)
        made, arrived = self._two(out), self._take(out, *out.shape)
        under_way = None
        for step in range(1, size + 1):
            total = made[step % len(made)] if step < size else out
            gemm_into(total, blocks[(rank + step) % size], b)
            if under_way is not None:
                total.add_(under_way.wait())
            if step < size:
                under_way = self.carrier.swap(total, self._down, arrived, self._up)
            yield
        self.carrier.pool.give_back([*made, arrived])
