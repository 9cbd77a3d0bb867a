"""Recomputes a checkpoint ahead, beside the gradients of the checkpoint after it.

A reentrant activation checkpoint runs its function once without gradients, keeps the inputs, and
runs it again in the backward.  In a chain, the output of one checkpoint is the input of the next::

    in order         | recompute 3 | gradients 3 | recompute 2 | gradients 2 | ...
    ahead   G        | recompute 3 | gradients 3 | gradients 2 | gradients 1
            R                      | recompute 2 | recompute 1 |

The recomputation is another pass, which takes turns with the gradients.  Each operation runs on the
same inputs and random states as in order, so the bits are the same.  One more checkpoint holds its
activations at a time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from commfuse_npu.overlap.states import PassState, RandomState, restore_states, save_states
from commfuse_npu.overlap.thread_context import Autocast, saved_tensors_hooks
from commfuse_npu.overlap.transfers import active_turns

__all__ = ["RecomputeAhead", "recompute_torch_ahead"]


@functools.cache
def recompute_torch_ahead(device: str) -> RecomputeAhead:
    """Wrap ``torch.utils.checkpoint``'s reentrant checkpoints, once in a process.

    A checkpoint that does not preserve random states is left alone.

    Args:
        device: ``npu``, ``cuda`` or ``cpu``.
    """
    from torch.utils.checkpoint import CheckpointFunction

    ahead = RecomputeAhead(lambda device: [RandomState(device)])
    plain = CheckpointFunction.forward

    @functools.wraps(plain)
    def forward(ctx: Any, function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        if not preserves:
            return plain(ctx, function, preserves, *args)
        return ahead.forward(plain, ctx, function, preserves, *args, autocast=Autocast(device))

    CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    return ahead


class RecomputeAhead:
    """Wraps the forward of a reentrant checkpoint, an autograd function.

    Left alone are checkpoints within hooks of saved tensors, which may move the inputs away (known
    from torch 2.8 on), those without inputs that require gradients, which are never recomputed, and
    inputs of which none is the output of another checkpoint.

    Args:
        random_states: the states that a checkpoint on a device (``npu``, ``cuda`` or ``cpu``)
            restores for its recomputation.

    Attributes:
        enabled: whether recomputations run ahead.
        count: number of recomputations that ran ahead.
        left_alone: why some checkpoints are not recomputed ahead.
    """

    def __init__(self, random_states: Callable[[str], Sequence[PassState]]) -> None:
        self.enabled = True
        self.count = 0
        self.left_alone: set[str] = set()
        self._random_states = random_states
        self._by_output = WeakTensorKeyDictionary()

    def forward(
        self,
        forward: Callable[..., Any],
        context: Any,
        function: Callable[..., Any],
        option: bool,
        *args: Any,
        autocast: Autocast | None = None,
        known: Callable[[], bool] = lambda: True,
    ) -> Any:
        """``forward(context, function, option, *args)`` with a function that may run ahead.

        Args:
            autocast: of the recomputation, else that of the backward.
            known: whether the function may run ahead yet, asked before each time.
        """
        trained = [value for value in args if torch.is_tensor(value) and value.requires_grad]
        if not trained:
            return forward(context, function, option, *args)
        if saved_tensors_hooks() is not None:
            self.left_alone.add("hooks of saved tensors may move their inputs away")
            return forward(context, function, option, *args)
        states = self._random_states(trained[0].device.type)
        before = self._before(trained)
        checkpoint = _Checkpoint(self, function, args, states, before, autocast, known)
        outputs = forward(context, checkpoint, option, *args)
        checkpoint.in_forward = False
        # Weak: without gradients nothing else keeps the checkpoint, which keeps its inputs.
        reference = weakref.ref(checkpoint)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if torch.is_tensor(output):
                self._by_output[output] = reference
        return outputs

    def _before(self, inputs: Sequence[torch.Tensor]) -> _Checkpoint | None:
        """The checkpoint whose output is among these inputs."""
        for tensor in inputs:
            if tensor in self._by_output:
                checkpoint: _Checkpoint | None = self._by_output[tensor]()
                return checkpoint
        return None


class _Recomputed(NamedTuple):
    """Leaves of the recomputed graph, and what the function returned for them."""

    leaves: tuple[Any, ...]
    outputs: Any


@dataclass(eq=False)
class _Checkpoint:
    """The function of a checkpoint: first called by its forward, then by its backward."""

    _ahead: RecomputeAhead
    _function: Callable[..., Any]
    _args: tuple[Any, ...] | None
    _states: Sequence[PassState]
    _before: _Checkpoint | None
    _autocast: Autocast | None
    _known: Callable[[], bool]
    _made: _Recomputed | None = None
    in_forward: bool = True

    def __post_init__(self) -> None:
        self._random = save_states(self._states)

    def __call__(self, *args: Any) -> Any:
        if self.in_forward:
            return self._function(*args)
        made = self._made
        self._made = None
        self._args = None
        before = self._before
        self._before = None
        if made is None:
            if before is None or not before.can_run_ahead():
                return self._function(*args)
            made = self._run(args)
        return _joined(made, before, args)

    def can_run_ahead(self) -> bool:
        """Whether the recomputation can begin now, beside something else."""
        return (
            self._ahead.enabled
            and self._args is not None
            and self._made is None
            and active_turns() is not None
            and self._known()
        )

    def run_ahead(self) -> None:
        """Recompute, for the backward that comes."""
        args = self._args
        if args is None:
            return
        self._args = None
        self._ahead.count += 1
        current = save_states(self._states)
        restore_states(self._states, self._random)
        try:
            with ExitStack() as stack:
                if self._autocast is not None:
                    self._autocast.enter(stack)
                self._made = self._run(args)
        finally:
            restore_states(self._states, current)

    def _run(self, args: tuple[Any, ...]) -> _Recomputed:
        leaves = tuple(
            value.detach().requires_grad_(value.requires_grad) if torch.is_tensor(value) else value
            for value in args
        )
        with torch.enable_grad():
            return _Recomputed(leaves, self._function(*leaves))


def _joined(made: _Recomputed, before: _Checkpoint | None, args: tuple[Any, ...]) -> Any:
    """What the function returned, as outputs of a graph whose inputs are ``args``."""
    several = isinstance(made.outputs, tuple)
    outputs = list(made.outputs) if several else [made.outputs]
    numbers = [
        number
        for number, output in enumerate(outputs)
        if torch.is_tensor(output) and output.requires_grad
    ]
    ends = [outputs[number] for number in numbers]
    for number, joined in zip(
        numbers, _Joined.apply(made.leaves, ends, before, *args), strict=True
    ):
        outputs[number] = joined
    return tuple(outputs) if several else outputs[0]


class _Joined(torch.autograd.Function):
    """Joins the recomputed graph to that of the backward which reads it.

    Its gradients run in the pass that calls it, the recomputation before in a pass of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, leaves: tuple[Any, ...], ends: list[torch.Tensor], before: Any, *args: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.leaves = leaves
        ctx.ends = ends
        ctx.before = before
        return tuple(end.detach() for end in ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ends = ctx.ends
        before = ctx.before
        ctx.ends = ctx.before = None
        turns = active_turns()
        if turns is None or before is None or not before.can_run_ahead():
            torch.autograd.backward(ends, grads)
        else:
            fork = turns.fork(before.run_ahead)
            torch.autograd.backward(ends, grads)
            turns.join(fork)
        results: list[torch.Tensor | None] = [None, None, None]
        for leaf in ctx.leaves:
            results.append(leaf.grad if torch.is_tensor(leaf) else None)
            if torch.is_tensor(leaf):
                leaf.grad = None  # given away: autograd copies what others hold
        return tuple(results)
