"""The workloads that are timed, each written once in terms of the layers of a form.

Legend: ``S`` sequence, ``s`` its shard (S/n), ``H`` hidden, ``F`` this rank's part of the MLP's
width, ``A`` and ``G`` its query and key heads, ``D`` features of a head.  Micro-batch 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from commfuse_npu.tools.bench.carriers import Carrier
from commfuse_npu.tools.bench.forms import Form
from commfuse_npu.tools.bench.shapes import WORKS, Shape

__all__ = ["Work"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Work:
    """One workload on one rank: its weights, its input and its computation.

    It excludes the optimizer and the gradients of the norms' weights (an all-reduce of a few
    bytes).

    Args:
        name: a key of :data:`~commfuse_npu.tools.bench.shapes.WORKS`.
        seed: of the random numbers; every rank adds its own rank.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        *,
        rank: int,
        size: int,
        dtype: str,
        device: torch.device,
        seed: int,
    ) -> None:
        self.name, self._kind, self.shape = name, WORKS[name], shape
        self._generator = torch.Generator().manual_seed(seed * 1009 + rank)
        self._dtype, self._device = _DTYPES[dtype], device
        self._heads, self._groups = shape.heads // size, shape.groups // size
        hidden, shard, ffn = shape.hidden, shape.sequence // size, shape.ffn // size
        self._layers: list[dict[str, torch.Tensor]] = []
        for _ in range(self._kind.layers):
            weights: dict[str, torch.Tensor] = {}
            if name not in ("reduce-scatter", "attention"):
                weights["gate_up"] = self._draw(2 * ffn, hidden, scale=hidden**-0.5)
            if name not in ("all-gather", "attention"):
                weights["down"] = self._draw(hidden, ffn, scale=shape.ffn**-0.5)
            if name not in ("all-gather", "reduce-scatter", "mlp"):
                wide = (self._heads + 2 * self._groups) * shape.head
                weights["qkv"] = self._draw(wide, hidden, scale=hidden**-0.5)
                inner = self._heads * shape.head
                weights["out"] = self._draw(hidden, inner, scale=(inner * size) ** -0.5)
            self._layers.append(weights)
        self._turns = self._rotary_turns()
        if name == "reduce-scatter":
            self._x = self._draw(shape.sequence, ffn)
        else:
            self._x = self._draw(shard, 1, hidden)
        self._grad = self._draw(shard, 1, hidden)
        # Rows of [s, H], the block of every collective in these workloads.
        self._block = self._draw(shard, hidden)
        self._full = self._block.repeat(size, 1)

    def run(self, form: Form) -> list[torch.Tensor]:
        """Run the workload once.

        Returns:
            The output, then, if there is a backward, the gradients of the input and the weights.
        """
        if not self._kind.backward:
            weights = self._layers[0]
            with torch.no_grad():
                if self.name == "all-gather":
                    return [form.all_gather_linear(self._x, weights["gate_up"])]
                return [form.linear_reduce_scatter(self._x, weights["down"])]
        forward, total = self.forward(form), None
        for _ in range(self._kind.micro_batches - 1):
            forward, total = form.pair(
                partial(self.forward, form), partial(_backward, *forward, total)
            )
        return [forward[0].detach(), *_backward(*forward, total)]

    def forward(self, form: Form) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """For a workload with a backward: output, (input and weights), gradient of the output."""
        y = x = self._x.detach().requires_grad_()
        layers = [
            {k: w.detach().requires_grad_() for k, w in layer.items()} for layer in self._layers
        ]
        half = {"mlp": self._mlp, "attention": self._attention}.get(self.name, self._layer)
        for weights in layers:
            y = half(form, y, weights)
        return y, [x, *(weight for layer in layers for weight in layer.values())], self._grad

    def communicate(self, carrier: Carrier) -> None:
        """Run only the collectives of the workload, blocking, one after the other."""
        for kind in self._kind.collectives:
            if kind == "gather":
                carrier.release(carrier.gather(self._block).result())
            else:
                carrier.scatter(self._full, torch.empty_like(self._block)).result()

    def _draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self._generator) * scale
        return numbers.to(self._device, self._dtype)

    def _mlp(self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up = form.all_gather_linear(x, weights["gate_up"]).chunk(2, dim=-1)
        return form.linear_reduce_scatter(torch.nn.functional.silu(gate) * up, weights["down"])

    def _attention(
        self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        heads = form.all_gather_linear(x, weights["qkv"]).unflatten(-1, (-1, self.shape.head))
        q, k, v = heads.split([self._heads, self._groups, self._groups], dim=2)
        q, k, v = self._turn(q), self._turn(k), v.contiguous()
        return form.attention_linear_reduce_scatter(q, k, v, weights["out"])

    def _layer(self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        x = x + self._attention(form, _norm(x), weights)
        return x + self._mlp(form, _norm(x), weights)

    def _rotary_turns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[S, 1, 1, D/2]`` of rotary position embeddings."""
        half = self.shape.head // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(self.shape.sequence)[:, None] * rates
        turns = angles.cos()[:, None, None], angles.sin()[:, None, None]
        cos, sin = (turn.to(self._device, self._dtype) for turn in turns)
        return cos, sin

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self._turns
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


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
