"""Keeps ``torch.compile`` from tracing functions that post transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["eager_only"]

F = TypeVar("F", bound=Callable[..., object])


def eager_only(function: F) -> F:
    """Decorator: a compiled caller has a graph break here, and the function runs in eager mode.

    Every public function of :mod:`commfuse_npu.ops` and :mod:`commfuse_npu.overlap` that posts or
    waits has it.  Traced, one op costs seconds of compilation and is compiled again for each shape.
    """
    disabled: F = torch.compiler.disable(function)
    return disabled
