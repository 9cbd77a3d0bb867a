"""Tensors of integers or of random floats, in several memory layouts.

Between two layers integers are clamped to -1, 0 and 1, forward and backward, so that every sum is
exact in its dtype for any number of layers.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from commfuse_npu.kernels import cpu
from tests.random_networks.case import Layout

Found = dict[str, torch.Tensor | None]
"""Results of a run, by name."""


def drawn(
    seed: int, what: str, shape: tuple[int, ...], dtype: torch.dtype, rounded: bool = False
) -> torch.Tensor:
    """Integers from -1 to 1, or normal floats if ``rounded``, determined by seed and name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {what}".encode()))
    if rounded:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


@contextmanager
def round_once() -> Iterator[None]:
    """Let the product's GEMMs round each element once, from fp64.

    How a GEMM library rounds a part of the rows or columns depends on the processor and the shape.
    Rounded once, a part has the bits of the whole, and differences come from sums and transfers.
    """
    gemm = cpu.gemm_into

    def rounded(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        wide = out.double()
        gemm(wide, a.double(), b.double())
        out.copy_(wide)

    with mock.patch.object(cpu, "gemm_into", rounded):
        yield


def laid_out(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same values in another memory layout; ``expanded`` repeats the first row."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "offset":
        flat = x.new_full((x.numel() + 1,), torch.nan)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if layout == "expanded":
        return x[:1].contiguous().expand_as(x)
    return x.contiguous()


def _small(x: torch.Tensor, rounded: bool) -> torch.Tensor:
    return x.clamp(-4, 4) if rounded else x.round().clamp(-1, 1)


def fitting(
    x: torch.Tensor, inputs: int, layout: Layout, rounded: bool, found: Found, name: str
) -> torch.Tensor:
    """``x`` for a layer of ``inputs`` features; its gradient is stored as ``found[name]``."""

    def store(grad: torch.Tensor) -> torch.Tensor:
        found[name] = grad.clone()
        return _small(grad, rounded)

    features = torch.arange(inputs) % max(1, x.shape[-1])
    small = x + (_small(x, rounded) - x).detach()  # the gradient of x is clamped by its hook
    fitted = laid_out(small[..., features], layout)
    if fitted.requires_grad:
        fitted.register_hook(store)
    return fitted


def arriving(y: torch.Tensor, layout: Layout, rounded: bool) -> torch.Tensor:
    """``y``, whose gradient is clamped and will have the given layout."""
    if y.requires_grad:
        y.register_hook(lambda grad: laid_out(_small(grad, rounded), layout))
    return y
