"""Recomputes layers without the GEMMs and transfers that no gradient reads.

Megatron's ``tensor_parallel.checkpoint`` runs a function of layers once for its output and again,
in the backward, for the tensors that gradients read.  The result of the last row-parallel layer of
the second run, fc2, is usually read by none: only its inputs are saved, and the residual addition
after it saves nothing (:mod:`commfuse_npu.overlap.unread`).

The first recomputation of each checkpoint runs in full and is watched.  If nothing reads the result
of its last row-parallel layer, on any rank of the tensor-parallel group, later ones leave out that
GEMM and its reduce-scatter or all-reduce.  A norm or a product after fc2 (sandwich norms) is a
reader; then nothing changes.  Experts, whose number of calls may depend on the data, are computed.

Later recomputations of a checkpoint run ahead (:mod:`commfuse_npu.overlap.recompute`), except for
distributed saved activations, whose inputs are not there.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.overlap.recompute import RecomputeAhead
from commfuse_npu.overlap.transfers import hook_collectives
from commfuse_npu.overlap.unread import Readers, saved_bytes
from commfuse_npu.runtime.undefined_results import undefined_results
from mindspeed_patches.fb_overlap.pass_states import random_states
from mindspeed_patches.patching import around


@dataclass(frozen=True)
class Calls:
    """Calls of row-parallel layers in a recomputation.

    Attributes:
        read: number of the first calls, of which something reads the last one; nothing reads the
            others.
        total: number of all calls.
    """

    read: int
    total: int


@dataclass
class _Run:
    """A recomputation that is under way.

    Attributes:
        known: its calls; ``None`` if it is watched.
        readers: watch it.
        called: number of calls so far.
        layer: the last row-parallel layer that was called.
    """

    known: Calls | None = None
    readers: Readers | None = None
    called: int = 0
    layer: Any = None


class Recomputation:
    """Wraps Megatron's checkpoints and row-parallel layers.

    Attributes:
        calls: by checkpoint, of those that were recomputed at least once.
        left_out: number of row-parallel layers whose result was left out.
        most_bytes: the most that a recomputation holds for its gradients.
        ahead: runs recomputations beside the gradients of the checkpoint after them.
        at_boundary: called before and at the end of each recomputation.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, Calls] = {}
        self.left_out = 0
        self.most_bytes = 0
        self.ahead = RecomputeAhead(random_states)
        self.at_boundary: Callable[[], object] = lambda: None
        # A recomputation runs in one thread: the caller's, or a device's autograd thread.
        self._this_thread = threading.local()

    def register(self, patch_manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        parallel = "megatron.core.tensor_parallel"
        checkpoint = f"{parallel}.random.CheckpointFunction.forward"
        patch_manager.register_patch(checkpoint, self.checkpoint_forward_wrapper)
        row = f"{parallel}.layers.RowParallelLinear.forward"
        patch_manager.register_patch(row, self.row_forward_wrapper)

    @around
    def checkpoint_forward_wrapper(
        self,
        forward: Callable[..., Any],
        context: Any,
        function: Callable[..., Any],
        distribute: bool,
        *args: Any,
    ) -> Any:
        """Tell the recomputations of a checkpoint from its forward, which has no gradients."""
        checkpoint = identity(function)

        @functools.wraps(function)
        def run(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*inputs)
            self.at_boundary()
            outputs = self._recompute(checkpoint, function, inputs)
            self.at_boundary()
            return outputs

        if distribute:
            self.ahead.left_alone.add("--distribute-saved-activations divides their inputs")
            return forward(context, run, distribute, *args)
        known = partial(self.calls.__contains__, checkpoint)
        return self.ahead.forward(forward, context, run, distribute, *args, known=known)

    @property
    def recomputing(self) -> bool:
        """Whether a recomputation runs in this thread."""
        return self._current is not None

    def _recompute(
        self, checkpoint: Hashable, function: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> Any:
        known = self.calls.get(checkpoint)
        if known is not None:
            run = _Run(known)
            outputs = self._run(run, function, inputs)
            if run.called != known.total and known.read < known.total:
                raise RuntimeError(
                    f"a recomputation called {run.called} row-parallel layers, the first one of "
                    f"the same checkpoint {known.total}, of which nothing read the last result; "
                    "recompute the same layers in each step, or set COMMFUSE_OVERLAP=0"
                )
            return outputs
        with Readers() as readers:
            run = _Run(readers=readers)
            outputs = self._run(run, function, inputs)
        self.most_bytes = max(self.most_bytes, saved_bytes(outputs))
        read = run.called - readers.unread(outputs)
        self.calls[checkpoint] = Calls(_most_on_any_rank(read, run.layer), run.called)
        hook_collectives()
        return outputs

    def _run(self, run: _Run, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        outer = self._current
        self._this_thread.run = run
        try:
            return function(*inputs)
        finally:
            self._this_thread.run = outer

    @around
    def row_forward_wrapper(
        self, forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``forward(layer, input_) -> (output, bias)``; the output may be undefined."""
        run = self._current
        if run is None or getattr(layer, "is_expert", False):
            return forward(layer, *args, **kwargs)
        run.called += 1
        run.layer = layer
        if run.readers is not None:
            with run.readers.follow_products():
                return forward(layer, *args, **kwargs)
        assert run.known is not None
        if run.called <= run.known.read:
            return forward(layer, *args, **kwargs)
        self.left_out += 1
        with undefined_results():
            return forward(layer, *args, **kwargs)

    def describe(self) -> list[str]:
        """What later recomputations leave out, and how they run."""
        lines = []
        if left_out := sum(calls.read < calls.total for calls in self.calls.values()):
            lines.append(
                f"recomputations of {left_out} checkpoints leave out the last GEMM and its "
                "transfer, which no gradient reads"
            )
        if self.ahead.count:
            lines.append(
                "recomputations run beside the gradients of the checkpoint after them; one more "
                f"checkpoint holds up to {self.most_bytes / 2**20:.1f} MiB at a time"
            )
        lines += (
            f"some checkpoints are recomputed in place: {why}" for why in self.ahead.left_alone
        )
        return lines

    @property
    def _current(self) -> _Run | None:
        return getattr(self._this_thread, "run", None)


def _most_on_any_rank(read: int, layer: Any) -> int:
    """The largest number among the ranks of a layer: all of them leave out the same transfers."""
    if layer is None:
        return read
    from megatron.core import parallel_state

    group = getattr(layer, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    most = torch.tensor([read], device=layer.weight.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most.item())


def identity(function: Callable[..., Any], outer: frozenset[int] = frozenset()) -> Hashable:
    """Equal for the functions that a model makes of the same layers in every forward.

    Of a closure its code and what it closes over: numbers and names by value (the range of layers),
    modules by identity, functions likewise, and of what changes with a micro-batch, as masks, the
    type.

    Args:
        outer: functions that contain this one, which may close over them.
    """
    if isinstance(function, MethodType):
        return identity(function.__func__, outer), _object(function.__self__)
    if isinstance(function, functools.partial):
        bound = (*function.args, *function.keywords.values())
        return identity(function.func, outer), tuple(_content(value, outer) for value in bound)
    if not isinstance(function, FunctionType):
        return _object(function)
    if id(function) in outer:
        return function.__code__
    outer |= {id(function)}
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__, tuple(_content(value, outer) for value in cells)


def _content(value: Any, outer: frozenset[int]) -> Hashable:
    if isinstance(value, torch.nn.Module):
        return _object(value)
    if callable(value):
        return identity(value, outer)
    return type(value), value if isinstance(value, (int, str)) else None


def _object(value: Any) -> Hashable:
    """Equal for this object only: a later module may get its address."""
    return weakref.ref(value) if isinstance(value, torch.nn.Module) else id(value)
