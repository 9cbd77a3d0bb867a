"""A package that patches Megatron's router: experts are chosen in advance, for each micro-batch.

Its state is in objects that only a list of their class holds.  A forward reads the choice of its
micro-batch and puts it into a queue, from which a recomputation takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch


class Routes:
    """The chosen experts of a layer."""

    of_layers: ClassVar[list[Routes]] = []

    def __init__(self, queue: Callable[[], Any]) -> None:
        self.chosen: Any = None
        self.waiting = queue()
        self.recomputes = False
        self.of_layers.append(self)

    def begin(self, chosen: torch.Tensor) -> None:
        self.chosen, self.recomputes = chosen, False
        self.waiting.append(chosen)

    def take(self) -> torch.Tensor:
        if not self.recomputes:
            return self.chosen
        return self.waiting.popleft() if isinstance(self.waiting, deque) else self.waiting.pop(0)


def routing(router: Any, logits: torch.Tensor, *_: Any, **__: Any) -> Any:
    """``TopKRouter.routing``: probabilities and map, each of shape ``[tokens, experts]``."""
    scores = logits.view(-1, router.config.num_moe_experts)
    chosen = Routes.of_layers[router.layer_number - 1].take()
    probs = torch.softmax(scores.gather(1, chosen), -1)
    empty = torch.zeros_like(scores)
    return empty.scatter(1, chosen, probs), empty.int().scatter(1, chosen, 1).bool()


def counting(of_own: Callable[..., Any]) -> Callable[..., Any]:
    """Scales the probabilities of a router by a number in its closure, which ``begin`` sets."""
    scale = 1.0

    def wrapped(router: Any, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = of_own(router, *args, **kwargs)
        return probs * scale, chosen

    def begin(value: float) -> None:
        nonlocal scale
        scale = value

    wrapped.begin = begin  # type: ignore[attr-defined]
    return wrapped
