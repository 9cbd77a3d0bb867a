"""The five pieces of work that are timed, each written once over the layers of a form.

Legend: ``S`` sequence, ``s`` its shard (S/n), ``H`` hidden, ``F`` this rank's part of the MLP's
width, ``A`` and ``G`` its query and key heads, ``D`` features of a head.  Micro-batch 1.
"""

from __future__ import annotations

import torch

from commfuse_npu.tools.bench.carriers import Carrier
from commfuse_npu.tools.bench.forms import Form
from commfuse_npu.tools.bench.shapes import COLLECTIVES, Shape

__all__ = ["DTYPES", "Work"]

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Work:
    """One work on one rank: its weights, its input, and what is computed with them.

    The optimizer and the gradients of the norms' weights (a few bytes of all-reduce) are not part
    of any work.

    Args:
        name: a key of :data:`~commfuse_npu.tools.bench.shapes.WORKS`.
        seed: of the numbers; every rank adds its own rank.
    """

    def __init__(
        self, name: str, shape: Shape, *, rank: int, size: int, dtype: str, device: str, seed: int
    ) -> None:
        self.name = name
        self.shape = shape
        self._generator = torch.Generator().manual_seed(seed * 1009 + rank)
        self._dtype, self._device = DTYPES[dtype], device
        self._heads, self._groups = shape.heads // size, shape.groups // size
        hidden, shard, ffn = shape.hidden, shape.sequence // size, shape.ffn // size
        self._weights: dict[str, torch.Tensor] = {}
        if name in ("all-gather", "mlp", "layer"):
            self._weights["gate_up"] = self._draw(2 * ffn, hidden, scale=hidden**-0.5)
        if name in ("reduce-scatter", "mlp", "layer"):
            self._weights["down"] = self._draw(hidden, ffn, scale=shape.ffn**-0.5)
        if name in ("attention", "layer"):
            wide = (self._heads + 2 * self._groups) * shape.head
            self._weights["qkv"] = self._draw(wide, hidden, scale=hidden**-0.5)
            inner = self._heads * shape.head
            self._weights["out"] = self._draw(hidden, inner, scale=(inner * size) ** -0.5)
            self._turns = self._rotary_turns()
        if name == "reduce-scatter":
            self._x = self._draw(shape.sequence, ffn)
        else:
            self._x = self._draw(shard, 1, hidden)
        self._grad = self._draw(shard, 1, hidden)
        # Rows of [s, H], what every collective of these works carries.
        self._block = self._draw(shard, hidden)
        self._full = self._block.repeat(size, 1)

    def run(self, form: Form) -> list[torch.Tensor]:
        """Do the work once.

        Returns:
            the output, then the gradients of the input and of the weights where there is a
            backward.
        """
        if self.name == "all-gather":
            with torch.no_grad():
                return [form.all_gather_linear(self._x, self._weights["gate_up"])]
        if self.name == "reduce-scatter":
            with torch.no_grad():
                return [form.linear_reduce_scatter(self._x, self._weights["down"])]
        forward = {"mlp": self._mlp, "attention": self._attention, "layer": self._layer}[self.name]
        x = self._x.detach().requires_grad_()
        weights = {name: w.detach().requires_grad_() for name, w in self._weights.items()}
        y = forward(form, x, weights)
        return [y.detach(), *torch.autograd.grad(y, [x, *weights.values()], self._grad)]

    def communicate(self, carrier: Carrier) -> None:
        """The collectives of the work one after the other, blocking, and no computation."""
        for kind in COLLECTIVES[self.name]:
            if kind == "gather":
                carrier.give_back(carrier.gather(self._block).wait())
            else:
                carrier.scatter(self._full, torch.empty_like(self._block)).wait()

    def _draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator) * scale
        return drawn.to(self._device, self._dtype)

    def _mlp(self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up = form.all_gather_linear(x, weights["gate_up"]).chunk(2, dim=-1)
        return form.linear_reduce_scatter(torch.nn.functional.silu(gate) * up, weights["down"])

    def _attention(
        self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        heads = form.all_gather_linear(x, weights["qkv"]).unflatten(-1, (-1, self.shape.head))
        q, k, v = heads.split([self._heads, self._groups, self._groups], dim=2)
        return form.attention_linear_reduce_scatter(
            self._turn(q), self._turn(k), v.contiguous(), weights["out"]
        )

    def _layer(self, form: Form, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        def norm(rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(rows, rows.shape[-1:])

        x = x + self._attention(form, norm(x), weights)
        return x + self._mlp(form, norm(x), weights)

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
