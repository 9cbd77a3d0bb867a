"""Defers the weight gradients of Megatron's linear layers and MindSpeed's grouped GEMMs.

In a pass, the backward of such a layer computes only the gradient of its input; that of the weight
joins a queue (:mod:`commfuse_npu.overlap.weight_gradients`).  Megatron's own backward does that if
its context says that weight gradients are computed later and accumulated by fusion.  It then
returns an undefined gradient, as with fusion, and ``grad_added_to_main_grad`` keeps the hook of
``DistributedDataParallel`` from adding it.

The first gradient of a weight does not wait but is watched:

- A weight whose hook may start a reduction (``--overlap-grad-reduce``) belongs to a group of
  buckets; its gradient of the last micro-batch does not wait.
- Without fusion, autograd adds the gradients of several uses (tied embeddings), in their dtype,
  before the hook adds the sum.  So gradients wait only if they reach the hook
  unchanged.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _current_graph_task_id
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.overlap.weight_gradients import WeightGradients
from mindspeed_patches.patching import around, register

_LAYERS = "megatron.core.tensor_parallel.layers"
_GROUPED = "mindspeed.ops.gmm"

Results = tuple[Any, ...]
"""Gradients of the inputs of a node, ``None`` where it has none."""


@dataclass(eq=False)
class _Weight:
    """What backwards have shown of a weight.

    Attributes:
        fused: whether its layer has gradient accumulation fusion.
        returned: the gradient that its layer returned, until it arrives.
        task: the number of the backward in which that was.
        waits: whether ``returned`` is undefined, because the gradient waits.
        watched: whether a gradient has arrived.
        alone: whether all gradients have arrived as they were returned.
        buckets: the group of buckets whose reduction the hook may start.
    """

    fused: bool
    returned: torch.Tensor | None = None
    task: int = 0
    waits: bool = False
    watched: bool = False
    alone: bool = True
    buckets: Callable[[], Any] = lambda: None

    def expect(self, returned: torch.Tensor | None, waits: bool) -> None:
        """The layer returns this; as it is kept, autograd adds nothing to it in place."""
        self.returned = returned
        self.task = _current_graph_task_id()
        self.waits = waits

    def may_wait(self, ctx: Any, weight: Any, queue: WeightGradients) -> bool:
        """Whether the gradient that this node computes may wait."""
        if not self.watched or not (self.fused or self.alone) or weight.main_grad is None:
            return False
        hooks = len(weight._backward_hooks) + len(weight._post_accumulate_grad_hooks or ())
        return not (
            # A hook of the user's would see the undefined gradient; one is ours.
            hooks > 1
            or getattr(self.buckets(), "is_last_microbatch", False)
            or getattr(weight, "zero_out_wgrad", False)
            or getattr(ctx, "_fwd_used_autocast", False)
            or torch.is_autocast_enabled(weight.device.type)
            or torch.is_grad_enabled()
            or _get_current_graph_task_keep_graph()
            or not queue.in_this_stream
        )

    def arrive(self, weight: Any, gradient: torch.Tensor) -> None:
        """A gradient arrives; the hook that adds it to ``main_grad`` is called next."""
        returned = self.returned if self.task == _current_graph_task_id() else None
        self.returned = None
        self.watched = True
        if self.fused:
            return
        alone = returned is not None and returned.data_ptr() == gradient.data_ptr()
        if self.waits and returned is not None and not alone:
            raise RuntimeError(
                f"a weight of shape {tuple(weight.shape)} was used once in its first backward, and "
                "more often in this one, where one gradient waits: it cannot be added to the "
                "others; use weights as often in each backward, or set COMMFUSE_OVERLAP=0"
            )
        weight.grad_added_to_main_grad = alone and self.waits
        turns = active_turns()
        if turns is not None and not alone:
            turns.weight_gradients.compute_those_of(weight)
            self.alone = False


class WeightGradientDeferral:
    """Wraps the backward of Megatron's linear layers and that of MindSpeed's grouped GEMMs.

    Attributes:
        most: the most gradients that waited in a backward, not all at a time.
        most_bytes: the most bytes of operands that waited at a time.
    """

    def __init__(self) -> None:
        self.most = 0
        self.most_bytes = 0
        self._weights = WeakTensorKeyDictionary()

    def register(self, patch_manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        linear = f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication.backward"
        patch_manager.register_patch(linear, self.linear_backward_wrapper)
        group = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
        register(patch_manager, group, self.register_grad_ready_wrapper)
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(_GROUPED)
            grouped = f"{_GROUPED}.GMMFunction.backward"
            patch_manager.register_patch(grouped, self.grouped_backward_wrapper)

    def describe(self) -> Iterator[str]:
        """How many gradients wait, if any."""
        if self.most:
            yield (
                f"up to {self.most} weight gradients of a micro-batch are computed during "
                f"transfers; those that wait hold up to {-(-self.most_bytes // 2**20)} MiB"
            )

    @around
    def register_grad_ready_wrapper(
        self,
        ready: Callable[..., None],
        buckets: Any,
        weight: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Keep the group of a weight, which calls this if its hook may start a reduction."""
        known = self._weights.get(weight)
        if known is not None:
            known.buckets = weakref.ref(buckets)  # which holds the weight
        ready(buckets, weight, *args, **kwargs)

    @around
    def linear_backward_wrapper(
        self, backward: Callable[..., Results], ctx: Any, grad_output: torch.Tensor
    ) -> Results:
        """``backward(ctx, grad_output) -> (grad_input, grad_weight, grad_bias, ...)``."""
        turns = active_turns()
        # MindSpeed's own backwards quantize weights, or let weight gradients wait themselves.
        if turns is None or inspect.unwrap(backward).__module__ != _LAYERS:
            return backward(ctx, grad_output)
        saved = ctx.saved_tensors
        # MindSpeed keeps the parameter where hooks may unpack another tensor.
        weight = getattr(ctx, "weight", saved[1])
        known = self._known(weight, ctx.gradient_accumulation_fusion)
        queue = turns.weight_gradients
        if ctx.grad_output_buffer is not None or not known.may_wait(ctx, weight, queue):
            queue.compute_those_of(weight)
            results = backward(_context(ctx, saved), grad_output)
            known.expect(results[1], waits=False)
            return results
        total_input, gather = _gathered(ctx, saved[0])
        later = {
            "gradient_accumulation_fusion": True,
            "main_grad": weight.main_grad,
            "grad_output_buffer": [],
            "wgrad_deferral_limit": 0,
            "use_bias": False,
        }
        results = backward(_context(ctx, saved, **later), grad_output)
        if gather is not None:
            # It was started before the reduce-scatter, which has ended.
            gather.wait()
        from megatron.core.tensor_parallel import layers

        operands = layers.prepare_input_tensors_for_wgrad_compute(grad_output, total_input)
        accumulate = _accumulate_fused if known.fused else _accumulate
        self._defer(queue, weight, accumulate, operands)
        known.expect(results[1], waits=True)
        bias = operands[0].sum(dim=0) if ctx.use_bias else None
        return (*results[:2], bias, *results[3:])

    @around
    def grouped_backward_wrapper(
        self, backward: Callable[..., Results], ctx: Any, grad_output: torch.Tensor
    ) -> Results:
        """``backward(ctx, grad_output) -> (None, grad_input, grad_weight, None, None)``."""
        turns = active_turns()
        if turns is None:
            return backward(ctx, grad_output)
        saved = ctx.saved_tensors
        weight = saved[-1]
        known = self._known(weight, ctx.gemm_fusion)
        queue = turns.weight_gradients
        in_tensor = ctx.group_list_data_type == 1 and ctx.group_list_type == 0
        if not in_tensor or not known.may_wait(ctx, weight, queue):
            queue.compute_those_of(weight)
            results = backward(_context(ctx, saved), grad_output)
            known.expect(results[2], waits=False)
            return results
        x, view, groups, _ = saved
        # What MindSpeed calls with fusion; without, it calls this GEMM inside of another function.
        gemms = importlib.import_module(_GROUPED).GMMFunction.builder.load()
        (grad_input,), *_ = gemms.npu_gmm_backward_fusion([grad_output], [view], groups, 0)
        accumulate = _accumulate_grouped_fused if known.fused else _accumulate_grouped
        self._defer(queue, weight, accumulate, (grad_output, x, groups))
        undefined = torch.empty_like(view)
        known.expect(undefined, waits=True)
        weight.grad_added_to_main_grad = True
        return None, grad_input, undefined, None, None

    def _known(self, weight: Any, fused: bool) -> _Weight:
        """What is known of a weight; nothing is kept of one whose gradient never waits."""
        known = self._weights.get(weight) if torch.is_tensor(weight) else None
        if known is not None:
            return known
        known = _Weight(fused)
        trained = torch.is_tensor(weight) and weight.is_leaf and weight.requires_grad
        if trained and hasattr(weight, "grad_added_to_main_grad"):
            self._weights[weight] = known
            itself = TensorWeakRef(weight)
            weight.register_hook(lambda gradient: known.arrive(itself(), gradient))
        return known

    def _defer(
        self,
        queue: WeightGradients,
        weight: torch.Tensor,
        accumulate: Callable[..., None],
        operands: Sequence[torch.Tensor],
    ) -> None:
        queue.add(weight, accumulate, operands)
        self.most = max(self.most, queue.deferred)
        self.most_bytes = max(self.most_bytes, queue.most_bytes)


def _context(ctx: Any, saved: tuple[torch.Tensor, ...], **changed: Any) -> SimpleNamespace:
    """The context of a node with other attributes.

    It has the tensors, as hooks may unpack them only once.
    """
    given = {"saved_tensors": saved, "needs_input_grad": ctx.needs_input_grad}
    return SimpleNamespace(**{**vars(ctx), **given, **changed})


def _gathered(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The whole input of a layer, and the transfer that is to be waited for, if any.

    Not into the buffer that Megatron's layers share, as it stays longer.
    """
    if not ctx.sequence_parallel:
        return x, None
    from megatron.core import parallel_state

    group = getattr(ctx, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    total = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    return total, dist.all_gather_into_tensor(total, x, group=group, async_op=True)


def _accumulate(weight: Any, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    """As Megatron's layer and the hook of ``DistributedDataParallel`` do."""
    weight.main_grad.add_(grad_output.t().matmul(total_input))


def _accumulate_fused(weight: Any, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    """As Megatron's layer does."""
    from megatron.core.tensor_parallel import layers

    fusion = layers.fused_weight_gradient_mlp_cuda
    fp32 = weight.main_grad.dtype == torch.float32
    add = fusion.wgrad_gemm_accum_fp32 if fp32 else fusion.wgrad_gemm_accum_fp16
    add(total_input, grad_output, weight.main_grad)


def _accumulate_grouped(
    weight: Any, grad_output: torch.Tensor, x: torch.Tensor, groups: torch.Tensor
) -> None:
    """As MindSpeed's grouped GEMM and the hook of ``DistributedDataParallel`` do."""
    gemms = importlib.import_module(_GROUPED).GMMFunction.builder.load()
    (gradient,) = gemms.npu_gmm([x.t()], [grad_output], [], groups, 2, 0)
    weight.main_grad.add_(gradient.view(weight.main_grad.shape))


def _accumulate_grouped_fused(
    weight: Any, grad_output: torch.Tensor, x: torch.Tensor, groups: torch.Tensor
) -> None:
    """As MindSpeed's grouped GEMM does."""
    add = importlib.import_module(_GROUPED).npu_groupmatmul_add_fp32
    add(x, grad_output, groups, weight.main_grad)
