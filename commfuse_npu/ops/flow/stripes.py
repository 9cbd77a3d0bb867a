"""Striped sequence parallelism: a rank has a part of every chunk of the sequence.

With ``n`` ranks and ``c`` chunks rank r has the r-th part of each chunk, instead of the r-th part
of the whole::

    rows of the sequence   0 ... 7       2 ranks, 2 chunks
    rank 0                 0 1 | 4 5     plain: 0 1 2 3
    rank 1                 2 3 | 6 7     plain: 4 5 6 7

An all-gather of chunk j of all ranks is then the j-th run of the sequence, in its order: positions
and causal masks are the plain ones.  Outside of the layers it is a permutation of the tokens before
the embedding, and of labels and losses.
"""

from __future__ import annotations

import torch

__all__ = ["stripe", "unstripe"]


def stripe(x: torch.Tensor, ranks: int, chunks: int, dim: int = 0) -> torch.Tensor:
    """The sequence in an order in which equal runs, one per rank, are the ranks' stripes.

    Equals, for ``dim = 0``::

        torch.cat([x[j * S / c :][r * S / (c * n) :][: S / (c * n)] for r in ranks for j in chunks])

    Args:
        x: the whole sequence in its order along ``dim``, ``S`` rows.

    Raises:
        ValueError: ``ranks * chunks`` does not divide the rows.
    """
    return _swapped(x, chunks, ranks, dim)


def unstripe(x: torch.Tensor, ranks: int, chunks: int, dim: int = 0) -> torch.Tensor:
    """The inverse of :func:`stripe`: back to the sequence's own order.

    Raises:
        ValueError: ``ranks * chunks`` does not divide the rows.
    """
    return _swapped(x, ranks, chunks, dim)


def _swapped(x: torch.Tensor, first: int, second: int, dim: int) -> torch.Tensor:
    rows = x.shape[dim]
    if rows % (first * second):
        raise ValueError(
            f"{rows} rows cannot be cut into {first * second} equal stripes, one per rank and "
            f"chunk; pad them to {-(-rows // (first * second)) * first * second}"
        )
    parts = x.unflatten(dim, (first, second, -1))
    at = dim % x.dim()
    return parts.transpose(at, at + 1).flatten(at, at + 2)
