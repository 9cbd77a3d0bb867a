"""The workloads that are timed, each written once in terms of the layers of a form.

Legend: ``S`` sequence, ``s`` its shard (S/n), ``H`` hidden, ``F`` this rank's part of the MLP's
width, ``A`` and ``G`` its query and key heads, ``D`` features of a head.  Micro-batch 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from commfuse_npu.tools.measure.forms import Form
from commfuse_npu.tools.measure.steps import WORKS, Scale

__all__ = ["Work"]


class Work:
    """One workload on one rank: its weights, its input and its computation.

    It excludes rotary embeddings, the optimizer and the gradients of the norms' weights.

    Args:
        name: a key of :data:`~commfuse_npu.tools.measure.steps.WORKS`.
    """

    def __init__(self, name: str, scale: Scale, *, rank: int, device: torch.device) -> None:
        self._kind, self._generator = WORKS[name], torch.Generator().manual_seed(rank)
        self._device = device
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        size, hidden, self._head = scale.ranks, scale.hidden, scale.head
        self._heads, self._groups = scale.heads // size, scale.groups // size
        shard, ffn, inner = scale.sequence // size, scale.ffn // size, self._heads * scale.head
        self._layers: list[dict[str, torch.Tensor]] = []
        for _ in range(self._kind.layers):
            weights = {
                "gate_up": self._draw(2 * ffn, hidden, scale=hidden**-0.5),
                "down": self._draw(hidden, ffn, scale=scale.ffn**-0.5),
            }
            if name != "mlp":
                wide = (self._heads + 2 * self._groups) * scale.head
                weights["qkv"] = self._draw(wide, hidden, scale=hidden**-0.5)
                weights["out"] = self._draw(hidden, inner, scale=(inner * size) ** -0.5)
            self._layers.append(weights)
        self._layer = self._mlp if name == "mlp" else self._whole_layer
        self._x = self._draw(shard, 1, hidden)
        self._grad = self._draw(shard, 1, hidden)

    def run(self, form: Form) -> list[torch.Tensor]:
        """Run the workload once.

        Returns:
            The output, then the gradients of the input and the weights.
        """
        forward, total = self.forward(form), None
        for _ in range(self._kind.micro_batches - 1):
            forward, total = form.pair(
                partial(self.forward, form), partial(_backward, *forward, total)
            )
        return [forward[0].detach(), *_backward(*forward, total)]

    def forward(self, form: Form) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Output, (input and weights), gradient of the output."""
        y = x = self._x.detach().requires_grad_()
        layers = [
            {k: w.detach().requires_grad_() for k, w in layer.items()} for layer in self._layers
        ]
        for weights in layers:
            y = self._layer(form, y, weights)
        return y, [x, *(weight for layer in layers for weight in layer.values())], self._grad

    def _draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self._generator) * scale
        return numbers.to(self._device, self._dtype)

    def _mlp(self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up = form.all_gather_linear(x, weights["gate_up"]).chunk(2, dim=-1)
        return form.linear_reduce_scatter(torch.nn.functional.silu(gate) * up, weights["down"])

    def _attention(
        self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        heads = form.all_gather_linear(x, weights["qkv"]).unflatten(-1, (-1, self._head))
        parts = heads.split([self._heads, self._groups, self._groups], dim=2)
        q, k, v = (part.contiguous() for part in parts)
        return form.attention_linear_reduce_scatter(q, k, v, weights["out"])

    def _whole_layer(
        self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        x = x + self._attention(form, _norm(x), weights)
        return x + self._mlp(form, _norm(x), weights)


def _norm(rows: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight."""
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:])


def _backward(
    y: torch.Tensor,
    leaves: list[torch.Tensor],
    grad: torch.Tensor,
    total: Sequence[torch.Tensor] | None,
) -> Sequence[torch.Tensor]:
    """Gradients of the leaves, added to those of earlier micro-batches."""
    grads = torch.autograd.grad(y, leaves, grad)
    return grads if total is None else [a.add_(b) for a, b in zip(total, grads, strict=True)]
