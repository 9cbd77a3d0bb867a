"""The halves of a Llama layer as parts of a flow (:class:`~commfuse_npu.ops.flow.Part`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_npu.ops.flow import CausalChunks

__all__ = ["AttentionPart", "Heads", "MlpPart", "norm", "swiglu"]

Heads = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Queries, keys and values, turned, of what the first layer puts out for a run of the sequence."""


def norm(rows: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight."""
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:])


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``[..., 2F]`` to ``[..., F]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class _Part:
    def __init__(self, name: str, column: torch.Tensor, row: torch.Tensor) -> None:
        self.name = name
        self.weights: Sequence[tuple[torch.Tensor, bool]] = [(column, False), (row, False)]

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return norm(hidden)

    def leave(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + y


class AttentionPart(_Part):
    """Norm, QKV, causal attention, output, residual sum; of one layer in one pass.

    Args:
        qkv, out: this rank's weights.
        chunks: how many will come.
    """

    def __init__(
        self, name: str, qkv: torch.Tensor, out: torch.Tensor, heads: Heads, chunks: int
    ) -> None:
        super().__init__(name, qkv, out)
        self._heads, self._core = heads, CausalChunks(chunks)

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        y = flow.column(arriving, weights[0])
        run = slice(chunk * y.shape[0], (chunk + 1) * y.shape[0])
        attended = self._core.attend(*self._heads(y, run)).flatten(2)
        return flow.row(attended, weights[1], f"{self.name}, chunk {chunk}", arriving)


class MlpPart(_Part):
    """Norm, gate and up, SwiGLU, down, residual sum."""

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        y = swiglu(flow.column(arriving, weights[0]))
        return flow.row(y, weights[1], f"{self.name}, chunk {chunk}", arriving)
