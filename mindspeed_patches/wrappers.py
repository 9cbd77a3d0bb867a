"""Forward wrappers for Megatron's tensor-parallel linear layers.

The layers keep their classes, their initialization and their checkpoint code.  Only ``forward`` is
wrapped; where the fused form does not apply, the wrapper calls the original.  (Replacing the
classes fails: Megatron's ``__init__`` calls ``super(ColumnParallelLinear, self)`` through the name
in its module.)

Column-parallel layers, also MindSpeed's with a norm before, run ``all_gather_linear``, and
row-parallel ones ``linear_reduce_scatter``; without sequence parallelism both stay Megatron's.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.launch.options import LAYERS
from commfuse_npu.launch.refusals import EXPERTS, RECOMPUTED, layer_obstacle
from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    attention_linear_reduce_scatter,
    linear_reduce_scatter,
)
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.plan import default_chunks, min_rows_to_fuse
from commfuse_npu.plan.machines import described, outputs_to_hide
from commfuse_npu.runtime.post_time import post_seconds
from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.core_pieces import Piece, first_difference
from mindspeed_patches.job_lanes import TENSOR_PARALLEL, LaneUser
from mindspeed_patches.layer_names import layer_name, named_init_wrapper, register_names
from mindspeed_patches.patching import around
from mindspeed_patches.self_attention import (
    DeferredAttention,
    attention_arguments,
    heads_obstacle,
    proj_obstacle,
)

_CHOSEN = (
    "CommFuse: a post takes the slowest host %.0f us (measured): blocks of %d rows or more are "
    "fused, in %d chunks; --commfuse-chunks N fuses all blocks, in N chunks"
)

PARTNER = "forward-backward overlap hides its transfers already"
"""Why no layer is fused inside a pair of forward-backward overlap."""

Output = tuple[torch.Tensor, torch.Tensor | None]
"""Output of a layer: the product, and the bias if the caller adds it."""

_logger = logging.getLogger(__name__)
_MODULE = "megatron.core.tensor_parallel.layers"
_READ = "weight skip_bias_add bias sequence_parallel gradient_accumulation_fusion"
_FORWARDS = (
    Piece(
        f"{_MODULE}.ColumnParallelLinear.forward",
        "self input_ weight runtime_gather_output",
        read=f"{_READ} gather_output output_size_per_partition input_size",
    ),
    Piece(f"{_MODULE}.RowParallelLinear.forward", "self input_", read=f"{_READ} input_is_parallel"),
)
_MORE_ARGUMENTS = "its forward gets arguments that are not known"
_SELF_ATTENTION = "megatron.core.transformer.attention.SelfAttention.__init__"


def by_fusion(options: LinearOptions) -> dict[bool, LinearOptions]:
    """The options of a layer, by its ``gradient_accumulation_fusion``."""
    return {fusion: replace(options, main_grad=fusion) for fusion in (False, True)}


def trained_bias(bias: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    """The bias, detached if the weight is frozen, as in Megatron's column-parallel layer."""
    return bias if bias is None or weight.requires_grad else bias.detach()


class LinearWrappers(LaneUser):
    """The wrappers of linear layers, with their transport, options and call counts.

    Args:
        options: of the fused layers; ``main_grad`` follows each layer's
            ``gradient_accumulation_fusion``.
        layers: which of :data:`LAYERS` to fuse.
        limited: on an NPU with a hardware description, set ``min_rows`` and the chunks by the cost
            of a post, which is measured when the lanes are created.
        rows, hidden: shape of a block in this launch, if known.

    Attributes:
        calls: number of calls by ``(layer, path)``; the path is ``fused``, or the reason why the
            call was not fused.
        reported: reasons that were logged, or printed at the start, by ``(layer, reason)``.
        min_rows: layers with fewer rows in a rank's block keep Megatron's forward: 0, or
            :func:`~commfuse_npu.plan.min_rows_to_fuse`.

    Raises:
        ValueError: a layer is unknown.
    """

    def __init__(
        self,
        options: LinearOptions = LinearOptions(),
        layers: Collection[str] = LAYERS,
        *,
        limited: bool = False,
        rows: int | None = None,
        hidden: int | None = None,
    ) -> None:
        unknown = sorted(set(layers) - set(LAYERS))
        if unknown:
            raise ValueError(
                f"unknown layers {', '.join(unknown)}; choose from {', '.join(LAYERS)}"
            )
        super().__init__("LinearWrappers", TENSOR_PARALLEL, options.schedule)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.layers = frozenset(layers)
        self.min_rows = 0
        self._limited = limited
        self._rows = rows
        self._hidden = hidden
        self._options = by_fusion(options)
        self.reported: set[tuple[str, str]] = set()

    @functools.cached_property
    def _difference(self) -> str | None:
        """What this version of Megatron core lacks."""
        return first_difference(_FORWARDS)

    def opened(self) -> None:
        """Apply the hardware description of this NPU, and measure the cost of a post if needed.

        From the number of outputs whose GEMMs hide them, column-parallel layers keep Megatron's
        collectives in their backward.
        """
        lanes = self.lanes()
        if lanes.device_type == "cpu":
            return
        machine = described(str(torch.get_device_module(lanes.device_type).get_device_name()))
        if machine is None:
            return
        least = outputs_to_hide(machine, lanes.size)
        options = replace(self._options[False], collectives_from=least)
        if self._limited and isinstance(lanes, Transport) and lanes.size > 1:
            post = post_seconds(lanes, options.schedule)
            self.min_rows = min_rows_to_fuse(lanes.size, self._hidden, post)
            chunks = default_chunks(lanes.size, self._rows or 0, self._hidden, post)
            options = replace(options, schedule=replace(options.schedule, chunks=chunks))
            if dist.get_rank() == 0:
                _logger.info(_CHOSEN, 1e6 * post, self.min_rows, chunks)
        self._options = by_fusion(options)

    def register(
        self, manager: Any, *, norm_column: str | None = None, attention: bool = False
    ) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in.

        Args:
            norm_column: dotted path of a class of MindSpeed to wrap, too, which under
                ``--transformer-impl transformer_engine`` replaces qkv and fc1 together with the
                norms before them.  The row-parallel layer there is Megatron's own, for Megatron
                core 0.16 MindSpeed's, which is not fused.
            attention: also defer the core attention of self-attention layers to their ``proj``.
        """
        for name, forward_wrapper in (
            ("ColumnParallelLinear", self.column_forward_wrapper),
            ("RowParallelLinear", self.row_forward_wrapper),
        ):
            manager.register_patch(f"{_MODULE}.{name}.__init__", named_init_wrapper)
            manager.register_patch(f"{_MODULE}.{name}.forward", forward_wrapper)
        register_names(manager)
        if norm_column is not None:
            manager.register_patch(f"{norm_column}.__init__", self.norm_column_init_wrapper)
        if attention:
            manager.register_patch(_SELF_ATTENTION, self.self_attention_init_wrapper)

    @around
    def norm_column_init_wrapper(
        self, init: Callable[..., None], layer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Store the layer's name and replace its linear part; its norm stays."""
        named_init_wrapper(init)(layer, *args, **kwargs)
        linear = layer._linear_forward_impl

        def linear_forward(**given: Any) -> torch.Tensor:
            x, weight, bias = (given[name] for name in ("input", "weight", "bias"))
            output = self._column(layer, x, weight, bias, layer.gather_output)
            return linear(**given) if output is None else output

        layer._linear_forward_impl = linear_forward
        layer.commfuse_linear_forward = True

    @around
    def column_forward_wrapper(
        self,
        forward: Callable[..., Output],
        layer: Any,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *more: Any,
        **named: Any,
    ) -> Output:
        """``forward(input_, weight=None, runtime_gather_output=None) -> (output, bias)``."""
        if more or named:
            self.fall_back(layer_name(layer), _MORE_ARGUMENTS)
            return forward(layer, input_, weight, runtime_gather_output, *more, **named)
        used = layer.weight if weight is None else weight
        expected = layer.output_size_per_partition, layer.input_size
        if used is None or (weight is not None and weight.shape != expected):
            return forward(layer, input_, weight, runtime_gather_output)  # which raises
        gather = layer.gather_output if runtime_gather_output is None else runtime_gather_output
        added, apart = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)
        output = self._column(layer, input_, used, added, gather)
        if output is None:
            return forward(layer, input_, weight, runtime_gather_output)
        return output, apart

    def _column(
        self,
        layer: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gather: bool,
    ) -> torch.Tensor | None:
        """The product if the call is fused, or ``None`` after counting the reason."""
        name = layer_name(layer)
        reason = self._obstacle(layer, input_.shape[:-1].numel(), gather)
        if reason is not None:
            self.fall_back(name, reason)
            return None
        self.calls[name, "fused"] += 1
        options = self._options[layer.gradient_accumulation_fusion]
        bias = trained_bias(bias, weight)
        return all_gather_linear(input_, weight, bias, group=self.lanes(), options=options)

    @around
    def row_forward_wrapper(
        self,
        forward: Callable[..., Output],
        layer: Any,
        input_: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> Output:
        """``forward(input_) -> (output, bias)``."""
        name = layer_name(layer)
        lanes = self.lanes()
        reason = self._obstacle(layer, input_.shape[:-1].numel() // lanes.size)
        if more or named:
            reason = _MORE_ARGUMENTS
        options = self._options[layer.gradient_accumulation_fusion]
        if isinstance(input_, DeferredAttention):
            if reason is None:
                self.calls.update({(name, "fused"): 1, ("attention", "fused"): 1})
                return input_.project(attention_linear_reduce_scatter, layer, options, lanes)
            self.fall_back("attention", reason)
            input_ = input_.value()
        if reason is not None:
            self.fall_back(name, reason)
            return forward(layer, input_, *more, **named)
        self.calls[name, "fused"] += 1
        added, apart = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)
        y = linear_reduce_scatter(input_, layer.weight, added, group=lanes, options=options)
        return y, apart

    @around
    def self_attention_init_wrapper(
        self, init: Callable[..., None], layer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Replace the forward of the new layer's core attention by one that defers attention."""
        init(layer, *args, **kwargs)
        core = layer.core_attention
        attend = core.forward

        @functools.wraps(attend)
        def forward(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            attention = functools.partial(attend, query, key, value, *args, **kwargs)
            recomputed = layer.checkpoint_core_attention and layer.training
            reason = RECOMPUTED if recomputed else proj_obstacle(layer.linear_proj)
            reason = reason or heads_obstacle(query, key, value)
            found = reason or attention_arguments(core, args, kwargs, *query.shape[:2])
            if isinstance(found, str):
                self.fall_back("attention", found)
                return attention()
            return DeferredAttention.of(query, key, value, arguments=found, attend=attention)

        core.forward = forward

    def static_obstacle(self, layer: Any) -> str | None:
        """Why no call of a tensor-parallel layer, of any class, is fused in this launch."""
        from megatron.core.tensor_parallel import layers

        known = layers.RowParallelLinear.forward, layers.ColumnParallelLinear.forward
        if type(layer).forward in known or hasattr(layer, "commfuse_linear_forward"):
            return self._obstacle(layer, self._rows, getattr(layer, "gather_output", False))
        return f"{type(layer).__name__} is not Megatron's linear layer"

    def _obstacle(self, layer: Any, rows: int | None, gather: bool = False) -> str | None:
        """Why a layer keeps Megatron's forward, and a way out; the same on all ranks.

        Args:
            rows: of a rank's block, if known.
            gather: whether its output is gathered.
        """
        if self._difference is not None:
            return self._difference
        name = layer_name(layer)
        row = hasattr(layer, "input_is_parallel")
        if gather:
            return "gather_output needs the whole output"
        if not getattr(layer, "input_is_parallel", True):
            return "its input is not parallel: Megatron scatters it first"
        if name == "experts":
            return EXPERTS
        turns = active_turns()
        if turns is not None and not turns.alone:
            return PARTNER
        # Layers of Megatron core 0.13 and later have a group of their own.
        if getattr(layer, "tp_group", None) not in (None, self.lanes().group):
            return "it transfers over another group than the tensor-parallel one"
        if getattr(layer, "gtp_remat_size", 1) > 1:
            return "gtp_weight_remat_size divides its weight, which Megatron gathers in the layer"
        if getattr(layer, "explicit_expert_comm", False):
            return (
                "moe_shared_expert_overlap gathers and scatters outside of the layer (leave "
                "--moe-shared-expert-overlap out)"
            )
        return layer_obstacle(
            name,
            column=not row,
            split=layer.sequence_parallel,
            size=self.lanes().size,
            layers=self.layers,
            given=lambda option: getattr(layer.config, option, False),
            rows=rows,
            least=self.min_rows,
        )

    def fall_back(self, name: str, reason: str, count: int = 1) -> None:
        """Count calls that Megatron executes; log each reason once, except :data:`PARTNER`."""
        self.calls[name, reason] += count
        if (name, reason) not in self.reported and reason != PARTNER:
            self.reported.add((name, reason))
            _logger.warning("CommFuse leaves %s to Megatron: %s", name, reason)

    def describe(self, fused: str = "fused") -> list[str]:
        """One line per layer and path; ``fused`` names the path of the ops."""
        counted = dict.fromkeys(("gradients", "parameters"), "buckets")
        # The fused calls of a layer first.
        paths = sorted((name, path != "fused", path) for name, path in self.calls)
        return [
            f"{name}: {self.calls[name, path]} {counted.get(name, 'forward calls')} "
            f"{f'by Megatron, because {path}' if left else fused}"
            for name, left, path in paths
        ]
