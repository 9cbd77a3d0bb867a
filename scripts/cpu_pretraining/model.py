"""A Llama built from Megatron-Core's parts, with its gradient buffers, optimizer and schedule."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from .data import VOCABULARY
from .ulysses_attention import UlyssesAttention

_PADDED = 512
"""The vocabulary is padded to a multiple of this, so that the model is the same in any layout."""
_NORM_EPSILON = 1e-5
_WEIGHT_DECAY = 0.1
_WARM_UP = 0.04


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor and the parameter attribute that Megatron expects.

    Megatron's own wrapper of torch norms refuses sequence parallelism, because every
    tensor-parallel rank then sees only its part of the sequence and the weight gradients have to be
    summed over the ranks. `finalize_model_grads` sums them for parameters with this attribute.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = _NORM_EPSILON, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _GateAndUp(ColumnParallelLinear):  # type: ignore[misc]
    """fc1, which stacks the gate and up projections.

    With stride 2, which core 0.16 and later pass, every rank draws its part of both; with the
    default, half of the ranks would take their gate from rows that belong to the up projection in
    another layout, and the initial model would depend on TP.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"stride": 2})


def build_trainee(
    args: argparse.Namespace,
) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """The wrapped model, its optimizer and its schedule; all random numbers come from `--seed`.

    Needs initialized process groups and `megatron_on_cpu()`. Every rank draws the full weight
    matrices and keeps its part, so the initial model is the same for every layout.
    """
    config = transformer_config(args)
    step = math.lcm(_PADDED, args.tensor_model_parallel_size)
    samples = args.train_iters * args.global_batch_size
    torch.manual_seed(args.seed)
    module: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=_llama_block(args),
        vocab_size=-(-VOCABULARY // step) * step,
        max_sequence_length=args.seq_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    if args.bf16:
        module = Float16Module(config, module)
    (model,), optimizer = with_optimizer(args, config, [module])
    config.no_sync_func = model.no_sync
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=int(_WARM_UP * (args.train_iters - 1)) * args.global_batch_size,
        lr_decay_steps=samples,
        lr_decay_style="cosine",
        start_wd=_WEIGHT_DECAY,
        end_wd=_WEIGHT_DECAY,
        wd_incr_steps=samples,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def transformer_config(args: argparse.Namespace, kind: Any = TransformerConfig) -> Any:
    """Megatron's configuration of a Llama; ``kind`` may be a subclass."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    llama = {
        "normalization": "RMSNorm",
        "layernorm_epsilon": _NORM_EPSILON,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    return kind(**llama | _given(kind, args))


def with_optimizer(
    args: argparse.Namespace, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> tuple[list[DistributedDataParallel], Any]:
    """The chunks of a model with Megatron's gradient buffers, and their Adam."""
    # Megatron's own setting for bf16: accumulate and reduce gradients in fp32.
    given = {"grad_reduce_in_fp32": True} | _given(DistributedDataParallelConfig, args)
    buckets = DistributedDataParallelConfig(**given)
    models = [
        DistributedDataParallel(config, buckets, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    adam = {"weight_decay": _WEIGHT_DECAY, "adam_beta2": 0.95, "params_dtype": config.params_dtype}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", **adam | _given(OptimizerConfig, args)), models
    )
    # Attributes that Megatron's training loop sets on the config before the first iteration.
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return models, optimizer


def _given(kind: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Megatron configuration that have an option of the same name."""
    return {
        field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)
    }


def _llama_block(args: argparse.Namespace) -> TransformerBlockSubmodules:
    """Megatron's local layer with our norm, and the same norm after the last layer."""
    layer = get_gpt_layer_local_spec()
    if args.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = UlyssesAttention
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    mlp = layer.submodules.mlp
    # Core 0.18 binds the parts of the MLP instead of naming them in a specification.
    parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    parts.linear_fc1 = _GateAndUp
    return TransformerBlockSubmodules(layer_specs=[layer] * args.num_layers, layer_norm=RMSNorm)
