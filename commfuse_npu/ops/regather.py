"""The input of a column-parallel layer, on its way again behind the layer that follows it.

In a backward the row-parallel layer comes first.  While its weight gradient is made the links are
free, and the column-parallel layer before it needs its input gathered again::

    compute  | dgrad of proj | wgrad of proj | attention | dgrad of qkv | wgrad of qkv
    links    | its gradients | input of qkv              |              | sums of dgrad

A row-parallel layer is paired with the last column-parallel one that ran before it on the same
transport: ``qkv`` and ``proj``, ``fc1`` and ``fc2``.  What the model does decides, so that ranks
that run the same model post in the same order.  The gathered input has its memory that much
earlier; the rest of the program's scratch is taken when its backward runs.

A backward that was pruned (``torch.autograd.grad`` for the weight of ``proj`` alone) leaves a
program under way.  It is drained at the next forward, as on all ranks, whichever thread that is in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from commfuse_npu.ops.call import AnyRun, AnyTransport

__all__ = ["Regather"]

Begin = Callable[[torch.Tensor], AnyRun]
"""Begins the backward of a column-parallel layer with this input."""


class Regather:
    """The input of one call of a column-parallel layer.

    Args:
        ctx: of its autograd function, which saves the input as its first tensor.
    """

    def __init__(self, transport: AnyTransport, ctx: Any, begin: Begin) -> None:
        self._calls = _calls(transport)
        self._ctx = weakref.ref(ctx)
        self._begin = begin
        self._begun: tuple[torch.Tensor, AnyRun] | None = None
        self._over = False
        self._calls.drain()
        self._calls.last = weakref.ref(self)

    @staticmethod
    def before(transport: AnyTransport) -> Regather | None:
        """That of the layer before the row-parallel one whose forward runs."""
        calls = _calls(transport)
        calls.drain()
        last, calls.last = calls.last, None
        return None if last is None else last()

    def begin(self) -> None:
        """Bring the input on its way, once, unless its layer's backward ran already."""
        ctx = self._ctx()
        if ctx is None or self._over or self._begun is not None:
            return
        x = ctx.saved_tensors[0]
        running = self._begin(x)
        self._begun = x, running
        self._calls.begun.append(self)
        running.run(ahead=True, x=x)

    def take(self) -> tuple[torch.Tensor, AnyRun] | None:
        """The input and what was begun with it, if it was; for the layer's backward.

        A saved tensor is unpacked once only: with activation checkpointing twice is an error.
        """
        self._over = True
        begun, self._begun = self._begun, None
        if begun is not None:
            self._calls.begun.remove(self)
        return begun


@dataclass
class _Calls:
    """The layers that ran on a transport.

    Attributes:
        last: the last column-parallel one that no row-parallel one followed yet.
        begun: whose inputs are on their way.
    """

    last: weakref.ref[Regather] | None = None
    begun: list[Regather] = field(default_factory=list)

    def drain(self) -> None:
        """Finish what no backward came for."""
        if not self.begun or torch._C._current_graph_task_id() != -1:
            return  # a recomputed forward belongs to a backward
        for one in list(self.begun):
            begun = one.take()
            assert begun is not None
            x, running = begun
            running.drain(grad_x=torch.empty_like(x))


def _calls(transport: AnyTransport) -> _Calls:
    found: _Calls | None = transport.remembered.get(__name__)
    if found is None:
        found = transport.remembered[__name__] = _Calls()
    return found
