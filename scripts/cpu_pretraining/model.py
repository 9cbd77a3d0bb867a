"""A Llama made of Megatron-Core's parts, its gradient buffers, its optimizer and its schedule."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from .data import VOCABULARY
from .megatron_on_cpu import cuda_means_cpu
from .ulysses import UlyssesAttention

__all__ = ["Trainee", "build_trainee", "model_flops_per_iteration", "padded_vocab_size"]

ROTARY_BASE = 10000
NORM_EPSILON = 1e-5
INIT_STD = 0.02


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor and the parameter mark that Megatron expects.

    Megatron's own wrapper of torch norms refuses sequence parallelism, because under it every
    tensor-parallel rank sees only its part of the sequence and the weight gradients have to be
    summed over the ranks. `finalize_model_grads` does that for marked parameters; so mark it.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = NORM_EPSILON, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Trainee:
    """What one run trains: the wrapped model, its optimizer and its learning-rate schedule."""

    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler
    config: TransformerConfig


def padded_vocab_size(args: argparse.Namespace) -> int:
    """Vocabulary rounded up so that every tensor-parallel rank gets whole multiples of it."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-VOCABULARY // multiple) * multiple


def build_trainee(args: argparse.Namespace) -> Trainee:
    """Build the model in its initial state; all random numbers come from `--seed`.

    Needs initialised process groups and `megatron_on_cpu()`. Every rank draws the whole weight
    matrices and keeps its part, so the initial model is the same for every layout that pads the
    vocabulary to the same size.
    """
    config = _transformer_config(args)
    torch.manual_seed(args.seed)
    module: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=_llama_block(args),
        vocab_size=padded_vocab_size(args),
        max_sequence_length=args.seq_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
    )
    if args.bf16:
        module = Float16Module(config, module)
    with cuda_means_cpu():
        model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                # Megatron's own choice for bf16: accumulate and reduce gradients in fp32.
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=args.overlap_grad_reduce,
                overlap_param_gather=args.overlap_param_gather,
                bucket_size=args.ddp_bucket_size,
                use_distributed_optimizer=args.use_distributed_optimizer,
            ),
            module,
        )
        optimizer = get_megatron_optimizer(_optimizer_config(args), [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
        # On resume the command line decides; the same command line gives the same rates.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    # What Megatron's training loop hangs on the config before the first iteration.
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    return Trainee(model, optimizer, scheduler, config)


def _transformer_config(args: argparse.Namespace) -> TransformerConfig:
    recompute: dict[str, Any] = {}
    if args.recompute:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        gradient_accumulation_fusion=args.gradient_accumulation_fusion,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPSILON,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=INIT_STD,
        use_cpu_initialization=True,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # The fused forms are CUDA kernels or need a compiler at run time.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )


def _llama_block(args: argparse.Namespace) -> TransformerBlockSubmodules:
    """Megatron's local layer with our norm in it, and the same norm after the last layer."""
    layer = get_gpt_layer_local_spec()
    if args.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = UlyssesAttention
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    # fc1 is gate and up projection on top of each other. With stride 2 every rank draws its part
    # of both; with Megatron's default, half of the ranks would take their gate from rows that are
    # the up projection in another layout, and the initial model would depend on TP.
    layer.submodules.mlp.submodules.linear_fc1 = ModuleSpec(
        module=ColumnParallelLinear, params={"stride": 2}
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * args.num_layers, layer_norm=RMSNorm)


def _optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )


def model_flops_per_iteration(args: argparse.Namespace) -> float:
    """Floating-point operations of the GEMMs of one iteration of the whole model.

    Forward plus twice that for backward; attention counted in full as it is computed (without
    skipping the masked half), recomputation not counted.
    """
    hidden, length = args.hidden_size, args.seq_length
    key_value = hidden * args.num_query_groups // args.num_attention_heads
    per_token_and_layer = (
        2 * hidden * (hidden + 2 * key_value)  # query, key, value
        + 2 * hidden * hidden  # output projection
        + 2 * 3 * hidden * args.ffn_hidden_size  # gate, up, down
        + 2 * 2 * length * hidden  # scores and weighted sum
    )
    per_token = args.num_layers * per_token_and_layer + 2 * hidden * padded_vocab_size(args)
    return 3.0 * args.global_batch_size * length * per_token
