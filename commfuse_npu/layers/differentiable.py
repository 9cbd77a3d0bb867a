"""How the autograd functions of the ops are called."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["differentiable"]

_AS_IS = nullcontext()


def differentiable(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """``function.apply(*args)``; under ``torch.no_grad`` its context needs no gradient either.

    Autocast is off inside: the arguments are cast, and sums in fp32 have to stay so.
    """
    if not torch.is_grad_enabled():
        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    device = next(a.device.type for a in args if isinstance(a, torch.Tensor))
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _AS_IS:
        result: torch.Tensor = function.apply(*args)
    return result
