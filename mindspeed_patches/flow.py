"""``--commfuse-flow``: Megatron's transformer layers in chunks that flow through the whole stage.

Where the layers keep their modules and their arithmetic, what changes is when each piece runs and
which rows a rank has (:mod:`commfuse_npu.ops.flow`):

======================  ==========================================================================
``GPTModel.forward``    token ids, positions and labels in stripes; losses in their own order
``TransformerBlock``    each layer learns which one follows it
``TransformerLayer``    attention and MLP chunk by chunk; a layer leaves its last transfers to the
                        next one, unless that is recomputed with what it has alone
``ColumnParallelLinear``, ``RowParallelLinear``   a chunk's part of the flow
======================  ==========================================================================

A sequence that ranks times chunks do not divide, or that is shorter than a given
``--commfuse-min-rows``, runs as without the flag, which every stage decides by the shape alone.
Models whose layers are not Megatron's own attention and MLP are refused by the class that is in the
way.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from commfuse_npu.ops.flow import CausalChunks, Flow, Stage, stripe, unstripe
from commfuse_npu.ops.flow.transfers import in_backward, token
from commfuse_npu.reference.flow import PlainFlow, PlainStage
from mindspeed_patches.refusals import IncompatibleOptionsError
from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["FlowWrappers"]

_GPT_MODELS = (
    "megatron.core.models.gpt.gpt_model",
    "mindspeed_llm.core.models.gpt.gpt_model",
)
_BLOCK = "megatron.core.transformer.transformer_block.TransformerBlock"


class FlowWrappers:
    """The wrappers of models, blocks and layers.

    Args:
        linears: the wrapped linear layers, which have the lanes and count the calls.
        chunks: how many runs the sequence is cut into.
        form: ``fused``; or ``plain``, the same chunks one after the other, over blocking
            collectives.
        min_rows: a sequence of which a rank's block has fewer rows does not flow.
    """

    def __init__(
        self, linears: LinearWrappers, chunks: int, form: str = "fused", min_rows: int = 0
    ) -> None:
        self._linears, self._chunks, self._form = linears, chunks, form
        self._min_rows = min_rows
        # Of the call that runs; ``None`` between calls.
        self._striped: bool | None = None
        # What a layer left to the next one: what that is handed, the stage, its first part.
        self._carried: tuple[torch.Tensor, Any, _Attention] | None = None

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        for module in _GPT_MODELS:
            if _exists(module):
                manager.register_patch(f"{module}.GPTModel.forward", self.gpt_forward_wrapper)
        manager.register_patch(f"{_BLOCK}.__init__", self.block_init_wrapper)

    # ------------------------------------------------------------------- the model

    def gpt_forward_wrapper(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Stripe what goes in, and put what comes out back in order."""
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def gpt_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._striped is not None:
                # MindSpeed-LLM puts its own model in the place of Megatron's: wrapped twice.
                return forward(model, *args, **kwargs)
            call = signature.bind(model, *args, **kwargs)
            given = call.arguments
            reason = self._obstacle(model, given)
            if reason is not None:
                if model.training:
                    raise IncompatibleOptionsError(
                        f"--commfuse-flow: {reason}; leave the option out"
                    )
                self._linears.leave("flow", reason)
            striped = reason is None and self._takes(*_sizes(model, given, self._ranks))
            for name in ("input_ids", "position_ids", "labels"):
                if striped and given.get(name) is not None:
                    given[name] = stripe(given[name], self._ranks, self._chunks, dim=1)
            self._striped = striped
            try:
                y = forward(*call.args, **call.kwargs)
            finally:
                self._striped = None
            if striped and model.post_process:
                y = unstripe(y, self._ranks, self._chunks, dim=1)
            return y

        return gpt_forward

    @property
    def _ranks(self) -> int:
        return self._linears.lanes().size

    def _takes(self, rows: int, batch: int) -> bool:
        """Whether sequences can be cut into stripes, and should be."""
        if rows % (self._ranks * self._chunks):
            reason = (
                f"a sequence of {rows} cannot be cut into {self._chunks} chunks for {self._ranks} "
                "ranks"
            )
        elif rows * batch // self._ranks < self._min_rows:
            reason = f"a block has fewer rows than the {self._min_rows} of --commfuse-min-rows"
        else:
            return True
        self._linears.leave("flow", reason)
        return False

    @staticmethod
    def _obstacle(model: Any, given: dict[str, Any]) -> str | None:
        """Why this call cannot be striped, whatever its length, or ``None``."""
        if getattr(model, "mtp_process", False):
            return "multi-token prediction shifts the tokens that each rank has"
        for name, why in (
            ("decoder_input", "decoder_input brings rows in an order of its own"),
            ("inference_context", "inference keeps keys in the order of the sequence"),
            ("inference_params", "inference keeps keys in the order of the sequence"),
            ("packed_seq_params", "packed sequences have boundaries that chunks do not respect"),
        ):
            if given.get(name) is not None:
                return why
        return None

    # ------------------------------------------------------------------- layers

    def block_init_wrapper(self, init: Callable[..., None]) -> Callable[..., None]:
        """Let each layer know the one that follows it."""

        @functools.wraps(init)
        def block_init(block: Any, *args: Any, **kwargs: Any) -> None:
            init(block, *args, **kwargs)
            layers = list(block.layers)
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                obstacle = layer_obstacle(layer)
                if obstacle is not None:
                    raise IncompatibleOptionsError(
                        f"--commfuse-flow: layer {getattr(layer, 'layer_number', '?')}: "
                        f"{obstacle}; leave the option out"
                    )
                layer.forward = self._flowing(layer, following, layer.forward)
                layer.commfuse_flows = True

        return block_init

    def _flowing(
        self, layer: Any, following: Any, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def layer_forward(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(("hidden_states", "attention_mask"), args, strict=False)) | kwargs
            hidden = given["hidden_states"]
            # A layer that is recomputed runs inside a backward, without the model around it.
            rows, batch, _ = hidden.shape
            again = in_backward() and self._takes(rows * self._ranks, batch)
            if not self._striped and not again:
                return forward(*args, **kwargs)
            signature.bind(*args, **kwargs)
            output = self._run(layer, following, hidden, given.get("rotary_pos_emb"))
            return output, given.get("context")

        return layer_forward

    def _run(self, layer: Any, following: Any, hidden: torch.Tensor, rotary: Any) -> torch.Tensor:
        carried, self._carried = self._carried, None
        if carried is not None and carried[0] is hidden:
            _, stage, attention = carried
        else:
            attention = self._attention(layer, rotary)
            stage = self._stage(hidden, attention)
        mlp = _Mlp(layer, self._linears)
        config = layer.config
        alone = config.recompute_granularity == "full" and layer.training
        ahead = None if following is None or alone else self._attention(following, rotary)
        stage.run(attention, mlp)
        stage.run(mlp, ahead)
        self._linears.calls["flow", self._form] += 1
        if ahead is None:
            return stage.end()
        empty = token(hidden, hidden.shape)
        self._carried = empty, stage, ahead
        return empty

    def _attention(self, layer: Any, rotary: Any) -> _Attention:
        return _Attention(layer, self._linears, rotary, self._chunks)

    def _stage(self, hidden: torch.Tensor, part: Any) -> Any:
        if self._form == "fused":
            return Stage(Flow(self._linears.lanes(), self._chunks), hidden, part)
        return PlainStage(PlainFlow(self._linears.lanes().group, self._chunks), hidden)


class Chunk:
    """A chunk inside a module of Megatron's: its linear layers ask here for their part of the flow.

    Args:
        flow: or its plain form.
        arriving: what was gathered.
        name: for errors.
    """

    def __init__(self, flow: Any, arriving: Any, weights: Sequence[Any], name: str) -> None:
        self._flow, self._arriving, self._weights, self._name = flow, arriving, weights, name
        self.leaving: Any = None

    def column(self, bias: torch.Tensor | None) -> torch.Tensor:
        return self._flow.column(self._arriving, self._weights[0], bias)

    def row(self, x: torch.Tensor) -> torch.Tensor:
        """Hands on what only the part may look into."""
        self.leaving = self._flow.row(x, self._weights[1], self._name, self._arriving)
        return getattr(self.leaving, "token", self.leaving)


class _Part:
    """What attention and MLP of a layer have in common.

    Attributes:
        name, weights: see :class:`~commfuse_npu.ops.flow.stage.Part`.
    """

    _what: str
    _linear_names: tuple[str, str]
    _module: str

    def __init__(self, layer: Any, linears: LinearWrappers) -> None:
        self.layer, self._linears = layer, linears
        self.name = f"{self._what} of layer {layer.layer_number}"
        module = getattr(layer, self._module)
        self.module = module
        self.weights = [
            (linear.weight, linear.gradient_accumulation_fusion)
            for linear in (getattr(module, name) for name in self._linear_names)
        ]
        self._bias: torch.Tensor | None = None

    @contextmanager
    def _chunk(
        self, flow: Any, arriving: Any, weights: Sequence[Any], number: int
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """The chunk, and what stands for its input."""
        chunk = Chunk(flow, arriving, weights, f"chunk {number} of {self.name}")
        self._linears.chunk = chunk
        try:
            yield chunk, getattr(arriving, "token", arriving)
        finally:
            self._linears.chunk = None

    def _sum(self, make: Any, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        with layer.bias_dropout_add_exec_handler():
            add = make(layer.training, layer.config.bias_dropout_fusion)
            return add((y, self._bias), hidden, layer.hidden_dropout)


class _Attention(_Part):
    """Norm, self-attention, residual sum of a layer."""

    _what, _module, _linear_names = "attention", "self_attention", ("linear_qkv", "linear_proj")

    def __init__(self, layer: Any, linears: LinearWrappers, rotary: Any, chunks: int) -> None:
        super().__init__(layer, linears)
        self._rotary = rotary if isinstance(rotary, tuple) or rotary is None else (rotary,) * 2
        self._core = CausalChunks(chunks, getattr(layer.config, "softmax_scale", None))

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer.input_layernorm(hidden)

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        attention = self.module
        with self._chunk(flow, arriving, weights, chunk) as (here, stand_in):
            q, k, v = attention.get_query_key_value_tensors(stand_in, None)
            if self._rotary is not None:
                run = slice(chunk * q.shape[0], (chunk + 1) * q.shape[0])
                q, k = (
                    x if positions is None else self._turned(x, positions[run])
                    for x, positions in zip((q, k), self._rotary, strict=True)
                )
            out = self._core.attend(q, k, v)
            _, self._bias = attention.linear_proj(out.flatten(2))
        return here.leaving

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Through the module: MindSpeed puts its own function there.
        module = importlib.import_module("megatron.core.transformer.attention")
        return module.apply_rotary_pos_emb(x, positions, config=self.layer.config, cu_seqlens=None)

    def leave(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self._sum(self.layer.self_attn_bda, y, hidden)


class _Mlp(_Part):
    """Norm, MLP, residual sum of a layer."""

    _what, _module, _linear_names = "MLP", "mlp", ("linear_fc1", "linear_fc2")

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer.pre_mlp_layernorm(hidden)

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        with self._chunk(flow, arriving, weights, chunk) as (here, stand_in):
            _, self._bias = self.module(stand_in)
        return here.leaving

    def leave(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self._sum(self.layer.mlp_bda, y, hidden)


def layer_obstacle(layer: Any) -> str | None:
    """Why a layer does not consist of Megatron's own attention and MLP, or ``None``."""
    for name, wanted in (
        ("self_attention", "SelfAttention"),
        ("mlp", "MLP"),
        ("cross_attention", "IdentityOp"),
        # MindSpeed-LLM's hyper-connections, which other models do not have.
        ("attn_mhc", "IdentityOp"),
        ("mlp_mhc", "IdentityOp"),
    ):
        module = getattr(layer, name, None)
        if module is None and wanted == "IdentityOp":
            continue
        found = type(module).__name__
        if found != wanted:
            return f"{name} of {type(layer).__name__} is a {found}, chunks need a {wanted}"
    for part, names in (("self_attention", ("linear_qkv", "linear_proj")),
                        ("mlp", ("linear_fc1", "linear_fc2"))):  # fmt: skip
        for name, wanted in zip(names, ("ColumnParallelLinear", "RowParallelLinear"), strict=True):
            linear: Any = getattr(getattr(layer, part), name, None)
            if type(linear).__name__ != wanted:
                return f"{name} is a {type(linear).__name__}, chunks need a {wanted}"
            if (
                wanted == "RowParallelLinear"
                and linear.bias is not None
                and not linear.skip_bias_add
            ):
                return f"{name} adds its bias itself"
    config = layer.config
    if not config.sequence_parallel:
        return "without sequence parallelism nothing is gathered or scattered"
    if config.context_parallel_size > 1:
        return "context parallelism splits the sequence in its own way"
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(config, name):
            return f"{name} is {getattr(config, name)}, chunks have none"
    modules = getattr(config, "recompute_modules", None) or ["core_attn"]
    if config.recompute_granularity == "selective" and modules != ["core_attn"]:
        return f"recompute_modules are {', '.join(modules)}; only core_attn, which is never kept"
    return None


def _sizes(model: Any, given: dict[str, Any], ranks: int) -> tuple[int, int]:
    """Length of the sequences, and how many; later stages know them by what the one before sent."""
    ids = given.get("input_ids")
    if ids is not None:
        batch, rows = ids.shape
        return rows, batch
    rows, batch, _ = model.decoder.input_tensor.shape
    return rows * ranks, batch


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
