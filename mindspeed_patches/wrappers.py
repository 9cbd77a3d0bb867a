"""Forward wrappers for Megatron's tensor-parallel linear layers.

The layers keep their classes, their initialisation and their checkpoint code: only ``forward`` is
wrapped, and where the fused form does not apply, the wrapper calls what it wraps.  (Replacing the
classes fails: Megatron's ``__init__`` calls ``super(ColumnParallelLinear, self)`` through the name
in its module.)

===============================  ==================  ============================================
layer                            sequence parallel   forward
===============================  ==================  ============================================
ColumnParallelLinear             yes                 ``all_gather_linear``
MindSpeed's column with norm     yes                 ``all_gather_linear`` after the norm
RowParallelLinear                yes                 ``linear_reduce_scatter``
RowParallelLinear                no                  ``linear_all_reduce``
everything else                                      Megatron's own
===============================  ==================  ============================================
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from commfuse_npu.hardware.machine import covering_outputs
from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    attention_linear_reduce_scatter,
    linear_all_reduce,
    linear_reduce_scatter,
)
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.plan import least_rows
from mindspeed_patches.deferred_attention import DeferredAttention
from mindspeed_patches.lanes import Form, OverLanes
from mindspeed_patches.layer_names import LAYERS, layer_name, named_init_wrapper, register_names
from mindspeed_patches.machine import described_machine
from mindspeed_patches.obstacles import Obstacle, told

__all__ = ["EXPERTS", "LAYERS", "PARTNER", "LinearWrappers"]

EXPERTS = "expert layers communicate by their own rules"
"""Why no layer of an expert is fused."""

PARTNER = "the micro-batch beside this one hides its transfers"
"""Why no layer is fused in a pair of forward-backward overlap."""

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

# What is counted of data parallelism, which is no layer.
_COUNTED = {"gradients": "buckets", "parameters": "buckets"}

_logger = logging.getLogger(__name__)
_MODULE = "megatron.core.tensor_parallel.layers"
_TRANSFORMER_ENGINE = "mindspeed.te.pytorch.module.layernorm_column_parallel_linear"


class LinearWrappers(OverLanes):
    """The wrappers, and what they share: a transport, options and the count of their calls.

    Args:
        options: of the fused layers; ``main_grad`` follows each layer's
            ``gradient_accumulation_fusion``.
        layers: which of :data:`LAYERS` to fuse.
        form: see :data:`~mindspeed_patches.lanes.Form`.
        min_rows: layers of which a rank's block has fewer rows keep Megatron's forward; ``None``:
            :func:`~commfuse_npu.plan.least_rows` on an NPU that is described, else 0.
        described: take ``collectives_from`` from the description of the NPU, if there is one.
        rows, hidden: of the blocks of this launch, if they are known.

    Attributes:
        transport: lanes of the tensor-parallel group.
        calls: how often each layer took which path, as ``(layer, path)``.
        layers: which are fused.

    Raises:
        ValueError: a layer is unknown.
    """

    _missing = (
        "of the tensor-parallel group do not exist: set LinearWrappers.transport = "
        "Transport.create(get_tensor_model_parallel_group()) on all ranks after "
        "initialize_model_parallel and before the first forward"
    )

    def __init__(
        self,
        options: LinearOptions = LinearOptions(),
        layers: Collection[str] = LAYERS,
        form: Form = "fused",
        *,
        min_rows: int | None = 0,
        described: bool = False,
        rows: int | None = None,
        hidden: int | None = None,
    ) -> None:
        unknown = sorted(set(layers) - set(LAYERS))
        if unknown:
            raise ValueError(
                f"unknown layers {', '.join(unknown)}; choose from {', '.join(LAYERS)}"
            )
        self.calls: Counter[tuple[str, str]] = Counter()
        self.layers = frozenset(layers)
        self._form = form
        self._rows, self._hidden, self._min_rows = rows, hidden, min_rows or 0
        self._described, self._limited = described, min_rows is None
        self._options = {fusion: replace(options, main_grad=fusion) for fusion in (False, True)}
        self._said: set[tuple[str, str]] = set()

    def opened(self) -> None:
        """Set what the machine's description is to say."""
        size = self.lanes().size
        machine = described_machine(self.lanes()) if self._described or self._limited else None
        if self._described:
            least = covering_outputs(machine, size) if machine else None
            for fusion, options in self._options.items():
                self._options[fusion] = replace(options, collectives_from=least)
        if self._limited:
            self._min_rows = least_rows(size, self._hidden) if machine else 0

    @property
    def _too_few(self) -> Obstacle:
        why = "Megatron's own order is faster then (simulated); " if self._limited else ""
        return Obstacle(
            f"a block has fewer rows than the {self._min_rows} of --commfuse-min-rows",
            f"{why}--commfuse-min-rows 0 fuses it, a smaller TP or longer sequences lengthen it",
        )

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        for name, forward_wrapper in (
            ("ColumnParallelLinear", self.column_forward_wrapper),
            ("RowParallelLinear", self.row_forward_wrapper),
        ):
            manager.register_patch(f"{_MODULE}.{name}.__init__", named_init_wrapper)
            manager.register_patch(f"{_MODULE}.{name}.forward", forward_wrapper)
        register_names(manager)

    def register_transformer_engine(self, manager: Any) -> None:
        """Register for the layer that ``--transformer-impl transformer_engine`` uses, too.

        MindSpeed's ``MindSpeedTELayerNormColumnParallelLinear`` takes the place of qkv and fc1
        together with the norms before them.  Its row-parallel layer is Megatron's own.
        """
        manager.register_patch(
            f"{_TRANSFORMER_ENGINE}.MindSpeedTELayerNormColumnParallelLinear.__init__",
            self.norm_column_init_wrapper,
        )

    def norm_column_init_wrapper(self, init: Callable[..., None]) -> Callable[..., None]:
        """Remember which layer this is, and take over its linear part; its norm stays."""
        init_and_name = named_init_wrapper(init)

        @functools.wraps(init)
        def norm_column_init(layer: Any, *args: Any, **kwargs: Any) -> None:
            init_and_name(layer, *args, **kwargs)
            linear = layer._linear_forward_impl

            def linear_forward(
                *,
                input: torch.Tensor,
                weight: torch.Tensor,
                bias: torch.Tensor | None,
                **keywords: Any,
            ) -> torch.Tensor:
                reason = self._column_call_obstacle(layer, input, weight, None)
                if reason is None:
                    return self._column_linear(layer, input, weight, bias)
                self.leave(layer_name(layer), reason)
                return linear(input=input, weight=weight, bias=bias, **keywords)

            layer._linear_forward_impl = linear_forward
            layer.commfuse_linear_forward = True

        return norm_column_init

    def column_forward_wrapper(self, forward: Forward) -> Forward:
        """``forward(input_, weight=None, runtime_gather_output=None) -> (output, bias)``."""

        @functools.wraps(forward)
        def column_forward(
            layer: Any,
            input_: torch.Tensor,
            weight: torch.Tensor | None = None,
            runtime_gather_output: bool | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            used = layer.weight if weight is None else weight
            reason = self._column_call_obstacle(layer, input_, used, runtime_gather_output)
            if reason is not None:
                self.leave(layer_name(layer), reason)
                return forward(layer, input_, weight, runtime_gather_output)
            bias = None if layer.skip_bias_add else layer.bias
            output = self._column_linear(layer, input_, used, bias)
            return output, layer.bias if layer.skip_bias_add else None

        return column_forward

    def _column_linear(
        self, layer: Any, input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.calls[layer_name(layer), self._form] += 1
        if bias is not None and not weight.requires_grad:
            # As in Megatron: beside a frozen weight the bias gets no gradient either.
            bias = bias.detach()
        options = self._options[layer.gradient_accumulation_fusion]
        return all_gather_linear(input_, weight, bias, transport=self.carrier(), options=options)

    def row_forward_wrapper(self, forward: Forward) -> Forward:
        """``forward(input_) -> (output, bias)``."""

        @functools.wraps(forward)
        def row_forward(
            layer: Any, input_: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            reason = self._row_call_obstacle(layer, input_)
            if isinstance(input_, DeferredAttention):
                if reason is None and layer.sequence_parallel:
                    return self._attention_and_row(layer, input_)
                self.leave("attention", reason or "without sequence parallelism nothing is split")
                input_ = input_.value()
            if reason is not None:
                self.leave(layer_name(layer), reason)
                return forward(layer, input_)
            self.calls[layer_name(layer), self._form] += 1
            bias = None if layer.skip_bias_add else layer.bias
            options = self._options[layer.gradient_accumulation_fusion]
            fused = linear_reduce_scatter if layer.sequence_parallel else linear_all_reduce
            output = fused(input_, layer.weight, bias, transport=self.carrier(), options=options)
            return output, layer.bias if layer.skip_bias_add else None

        return row_forward

    def _attention_and_row(
        self, layer: Any, attention: DeferredAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention that waited, and the projection of its output."""
        self.calls[layer_name(layer), self._form] += 1
        self.calls["attention", self._form] += 1
        arguments: dict[str, Any] = {
            "bias": None if layer.skip_bias_add else layer.bias,
            **attention.mask._asdict(),
            "scale": attention.scale,
            "options": self._options[layer.gradient_accumulation_fusion],
        }
        tensors = attention.q, attention.k, attention.v, layer.weight
        output = attention_linear_reduce_scatter(*tensors, **arguments, transport=self.carrier())
        return output, layer.bias if layer.skip_bias_add else None

    def standing_obstacle(self, layer: Any) -> str | None:
        """Why no call of a tensor-parallel layer is fused in this launch, or ``None``.

        Args:
            layer: column- or row-parallel, of whatever class.
        """
        from megatron.core.tensor_parallel import layers

        forward = type(layer).forward
        if forward is layers.RowParallelLinear.forward:
            obstacle = self._row_obstacle(layer)
        elif forward is layers.ColumnParallelLinear.forward or hasattr(
            layer, "commfuse_linear_forward"
        ):
            obstacle = self._column_obstacle(layer, layer.gather_output)
        else:
            return f"{type(layer).__name__} is not Megatron's linear layer"
        return obstacle or (None if self._rows is None else self._length_obstacle(self._rows))

    def _column_obstacle(self, layer: Any, gather: bool) -> str | None:
        if not layer.sequence_parallel:
            return Obstacle(
                "without sequence parallelism the forward has no transfer",
                "Megatron hides that of the backward behind wgrad; --sequence-parallel has both",
            )
        if gather:
            return "gather_output needs the whole output"
        if getattr(layer, "disable_grad_reduce", False):
            return "disable_grad_reduce leaves the reduction to others"
        if layer.config.defer_embedding_wgrad_compute and layer.commfuse_layer == "output":
            return Obstacle(
                "defer_embedding_wgrad_compute keeps the gradients for later",
                "leave --defer-embedding-wgrad-compute out",
            )
        if layer_name(layer) in ("q_up", "kv_up") and getattr(
            layer.config, "mla_up_proj_tp_overlap", False
        ):
            return Obstacle(
                "mla_up_proj_tp_overlap gathers its input before the call",
                "leave --mla-up-proj-tp-overlap out",
            )
        return self._obstacle(layer)

    def _row_obstacle(self, layer: Any) -> str | None:
        if not layer.input_is_parallel:
            return "the input has to be scattered first"
        return self._obstacle(layer)

    def _obstacle(self, layer: Any) -> str | None:
        """Why a layer of either kind keeps Megatron's forward, or ``None``."""
        name = layer_name(layer)
        if name == "experts":
            return EXPERTS
        if active_turns() is not None:
            return PARTNER
        if name not in self.layers:
            return Obstacle(
                f"{name} is not in the list of layers to fuse",
                f"add {name} to --commfuse-layers" if name in LAYERS else "",
            )
        if getattr(layer, "explicit_expert_comm", False):
            return Obstacle(
                "moe_shared_expert_overlap gathers and scatters outside of the layer",
                "leave --moe-shared-expert-overlap out",
            )
        if self.lanes().size == 1:
            return "a tensor-parallel group of one has nothing to transfer"
        if getattr(layer.config, "cpu_offloading", False):
            return "cpu_offloading needs Transformer Engine's layers"
        return None

    def _length_obstacle(self, rows: int) -> str | None:
        # By the shape, which is the same on all ranks.
        return self._too_few if rows < self._min_rows else None

    def _column_call_obstacle(
        self,
        layer: Any,
        input_: torch.Tensor,
        weight: torch.Tensor | None,
        runtime_gather_output: bool | None,
    ) -> str | None:
        if weight is None or tuple(weight.shape) != (
            layer.output_size_per_partition,
            layer.input_size,
        ):
            return "the weight is missing or has another shape"  # Megatron's error says it best
        gather = layer.gather_output if runtime_gather_output is None else runtime_gather_output
        return self._column_obstacle(layer, gather) or self._length_obstacle(
            input_.shape[:-1].numel()
        )

    def _row_call_obstacle(self, layer: Any, input_: torch.Tensor) -> str | None:
        ranks = self.lanes().size
        obstacle = self._row_obstacle(layer) or self._length_obstacle(
            input_.shape[:-1].numel() // ranks
        )
        if obstacle is None and layer.sequence_parallel and input_.shape[0] % ranks:
            return f"sequence length {input_.shape[0]} is not divisible by {ranks}"
        return obstacle

    def leave(self, name: str, reason: str, count: int = 1) -> None:
        """Count calls that Megatron does itself; a reason that was not said yet is logged."""
        self.calls[name, reason] += count
        if (name, reason) not in self._said and reason != PARTNER:
            self._said.add((name, reason))
            _logger.warning("CommFuse leaves %s to Megatron: %s", name, told(reason))

    def was_said(self, name: str, reason: str) -> None:
        """A reason that :meth:`leave` need not log."""
        self._said.add((name, reason))

    def describe(self) -> list[str]:
        """A line per layer and path: how many calls took it."""
        return [
            f"{name}: {count} {_COUNTED.get(name, 'forward calls')} "
            f"{path if path in ('fused', 'plain') else f'by Megatron, because {path}'}"
            for (name, path), count in sorted(self.calls.items())
        ]
