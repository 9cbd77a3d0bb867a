"""Autograd functions that keep nothing where nobody asks for a gradient."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["differentiable"]


def differentiable(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """``function.apply(*args)``; under ``torch.no_grad`` its context needs no gradient either."""
    if not torch.is_grad_enabled():
        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    result: torch.Tensor = function.apply(*args)
    return result
