"""Recomputes layers without the GEMMs and transfers that no gradient reads.

Megatron's ``tensor_parallel.checkpoint`` runs a function of layers once for its output and again,
in the backward, for the tensors that gradients read.  The result of the last row-parallel layer of
the second run, fc2, is usually read by no gradient: only its inputs are saved, and the residual
addition after it saves nothing (:mod:`commfuse_npu.overlap.unread`).

A checkpoint is known by the row-parallel layers that its forward calls.  Its first recomputation
runs in full and is watched.  If nothing reads the result of the last of these layers, on any rank
of the tensor-parallel group, later ones leave out that GEMM and its reduce-scatter or all-reduce.
A norm or a product after fc2 (sandwich norms) is a reader; then it is recomputed in full.  Experts,
whose number of calls may depend on the data, are computed.

Later recomputations of a checkpoint run ahead (:mod:`commfuse_npu.overlap.recompute`), except for
distributed saved activations, whose inputs are not there.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from commfuse_npu.overlap.recompute import RecomputeAhead
from commfuse_npu.overlap.transfers import hook_collectives
from commfuse_npu.overlap.unread import Readers, saved_bytes
from commfuse_npu.runtime.undefined_results import undefined_results
from mindspeed_patches.fb_overlap.pass_states import random_states
from mindspeed_patches.fb_overlap.state_owners import Models
from mindspeed_patches.patching import Function, around, replaced


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


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint of the same layers, in whichever step.

    Attributes:
        code: of its function, or the type of a callable.
        layers: the row-parallel layers that its forward called.
    """

    code: object
    layers: tuple[weakref.ref[torch.nn.Module], ...]


@dataclass
class _Run:
    """A recomputation that is under way.

    Attributes:
        known: its calls; ``None`` if it is watched.
        readers: watch it.
        layers: the row-parallel layers that were called so far.
    """

    known: Calls | None = None
    readers: Readers | None = None
    layers: list[torch.nn.Module] = field(default_factory=list)


class Recomputation:
    """Wraps Megatron's checkpoints and row-parallel layers.

    Attributes:
        calls: by checkpoint, of those that were recomputed at least once.
        leaves_out: whether recomputations leave out what nothing reads.
        left_out: number of row-parallel layers whose result was left out.
        most_bytes: the most that a recomputation holds for its gradients.
        ahead: runs recomputations beside the gradients of the checkpoint after them.
        at_boundary: called before and at the end of each recomputation.
    """

    def __init__(self) -> None:
        self.calls: dict[_Checkpoint, Calls] = {}
        self.leaves_out = False
        self.left_out = 0
        self.most_bytes = 0
        self.ahead = RecomputeAhead(random_states)
        self.at_boundary: Callable[[], object] = lambda: None
        self._trained: WeakKeyDictionary[torch.nn.Module, Hashable] = WeakKeyDictionary()
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
        forward: Function,
        context: Any,
        function: Function,
        distribute: bool,
        *args: Any,
    ) -> Any:
        """Tell the recomputations of a checkpoint from its forward, which has no gradients."""
        layers: list[torch.nn.Module] = []

        @functools.wraps(function)
        def run(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                with self._noted(layers):
                    return function(*inputs)
            self.at_boundary()
            return self._recompute(checkpoint(), functools.partial(function, *inputs))

        def checkpoint() -> _Checkpoint:
            code = getattr(function, "__code__", type(function))
            return _Checkpoint(code, tuple(map(weakref.ref, layers)))

        if distribute:
            self.ahead.left_alone.add("--distribute-saved-activations divides their inputs")
            return forward(context, run, distribute, *args)
        return self.ahead.forward(
            forward, context, run, distribute, *args, known=lambda: checkpoint() in self.calls
        )

    def leaving_out(self, models: Models) -> AbstractContextManager[None]:
        """A step of these models, in which recomputations leave out what nothing reads."""
        self._watch_again_if_changed(models)
        return replaced(self, leaves_out=True)

    def complete(self, plain: Function) -> Function:
        """Megatron's schedule with recomputations that compute everything."""

        def in_order(**step: Any) -> Any:
            with replaced(self, leaves_out=False):
                return plain(**step)

        return in_order

    def _watch_again_if_changed(self, models: Models) -> None:
        """Forget what gradients read if other parameters are trained, or hooks were added."""
        for model in models:
            trained = tuple(one.requires_grad for one in model.parameters())
            now = trained, sum(len(module._forward_hooks) for module in model.modules())
            if self._trained.setdefault(model, now) != now:
                self._trained[model] = now
                self.calls.clear()

    @contextmanager
    def _noted(self, layers: list[torch.nn.Module]) -> Iterator[None]:
        """In the block, add the row-parallel layers that are called to ``layers``."""
        outer = getattr(self._this_thread, "noted", None)
        with replaced(self._this_thread, noted=layers):
            yield
        if outer is not None:
            outer += layers

    @property
    def recomputing(self) -> bool:
        """Whether a recomputation runs in this thread."""
        return self._current is not None

    def _recompute(self, checkpoint: _Checkpoint, recompute: Callable[[], Any]) -> Any:
        known = self.calls.get(checkpoint)
        if known is not None:
            run = _Run(known)
            outputs = self._run(run, recompute)
            if len(run.layers) != known.total and known.read < known.total:
                raise RuntimeError(
                    f"a recomputation called {len(run.layers)} row-parallel layers, the first one "
                    f"of the same checkpoint {known.total}, of which nothing read the last result; "
                    "recompute the same layers in each step, or set COMMFUSE_OVERLAP=0"
                )
            return outputs
        with Readers() as readers:
            run = _Run(readers=readers)
            outputs = self._run(run, recompute)
        self.most_bytes = max(self.most_bytes, saved_bytes(outputs))
        total = len(run.layers)
        read = _most_on_any_rank(total - readers.unread(outputs), run.layers)
        self.calls = {
            other: calls
            for other, calls in self.calls.items()
            if None not in [ref() for ref in other.layers]
        }
        self.calls[checkpoint] = Calls(read, total)
        hook_collectives()
        return outputs

    def _run(self, run: _Run, recompute: Callable[[], Any]) -> Any:
        with replaced(self._this_thread, run=run):
            outputs = recompute()
            self.at_boundary()
            return outputs

    @around
    def row_forward_wrapper(self, forward: Function, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """``forward(layer, input_) -> (output, bias)``; the output may be undefined."""
        run = self._current
        if getattr(layer, "is_expert", False):
            return forward(layer, *args, **kwargs)
        noted = getattr(self._this_thread, "noted", None)
        if noted is not None:
            noted.append(layer)
        if run is None:
            return forward(layer, *args, **kwargs)
        run.layers.append(layer)
        if run.readers is not None:
            with run.readers.follow_products():
                return forward(layer, *args, **kwargs)
        assert run.known is not None
        if len(run.layers) <= run.known.read or not self.leaves_out:
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


def _most_on_any_rank(read: int, layers: Sequence[Any]) -> int:
    """The largest number among the ranks of the last layer: they leave out the same transfers."""
    from megatron.core import parallel_state

    if not layers:
        return read
    layer = layers[-1]
    group = getattr(layer, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    most = torch.tensor([read], device=layer.weight.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most.item())
