"""Small GPTs of the real Megatron, and the layouts that they are trained in."""

import argparse
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock

import torch

from mindspeed_patches.core_pieces import supported_keywords
from tests.patches.launches import real_arguments

LENGTH, BATCH, VOCABULARY = 16, 2, 64
BF16 = {"bf16": True}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}
DISTRIBUTED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
"""Options of Megatron."""


@dataclass(frozen=True)
class Case:
    """The layout of a training, its model, and what of it is fused.

    Attributes:
        context: ranks that share a sequence and exchange heads.
        launch: the options of CommFuse.
        options: of Megatron's model, buckets and optimizer, and what MindSpeed adds to them.
        mask: Megatron's kind of mask.
        rotary: Megatron's embeddings of positions (``rope``), other ones for keys (``two``), or
            ``none``.
        norms: of queries and keys; ``norm_column``: the layer before them has a norm, too.
        tied: embedding and output layer have the same weight.
        frozen: a part of the names of weights that are not trained.
        groups: pass the process groups, as later versions allow.
        lengths: of the sequences of micro-batches, in turns.
        pattern: the layers of a hybrid model, as ``*`` (attention) and ``-`` (MLP), instead of GPT.
        typed: a model of MindSpeed-LLM's fine-tuning has no type.
    """

    tensor: int = 1
    context: int = 1
    stages: int = 1
    chunks: int = 1
    experts: int = 1
    replicas: int = 1
    microbatches: int = 1
    launch: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    mask: str = "causal"
    rotary: str = "rope"
    norms: bool = False
    norm_column: bool = False
    tied: bool = False
    frozen: str | None = None
    groups: bool = False
    lengths: tuple[int, ...] = (LENGTH,)
    pattern: str | None = None
    typed: bool = True

    @property
    def size(self) -> int:
        return self.tensor * self.context * self.stages * self.replicas

    @property
    def documents(self) -> bool:
        """Whether a sequence has several, which MindSpeed packs and Megatron expects as a mask."""
        return "reset_attention_mask" in self.options

    @property
    def virtual(self) -> int | None:
        return self.chunks if self.chunks > 1 else None

    def but(self, options: dict[str, Any], **changes: Any) -> Any:
        """This case with more options of Megatron and other changes."""
        return replace(self, options=self.options | options, **changes)

    def args(self) -> argparse.Namespace:
        """The arguments of the launch, with one layer per chunk unless there are more."""
        usual = {
            "num_layers": self.stages * self.chunks,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": LENGTH,
            "micro_batch_size": BATCH,
            "bf16": False,
            "lr": 0.01,
            "init_method_std": 0.3,
            "batch_p2p_comm": False,
            "overlap_p2p_comm": self.chunks > 1,
            "tensor_model_parallel_size": self.tensor,
            "context_parallel_size": self.context,
            "pipeline_model_parallel_size": self.stages,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "expert_model_parallel_size": self.experts,
            "sequence_parallel": self.tensor > 1,
            "qk_layernorm": self.norms or "multi_latent_attention" in self.options,
            "transformer_impl": "local",
            "distributed_timeout_minutes": 3,
        }
        return real_arguments(*self.launch.split(), **usual | self.options)


class Core(torch.nn.Module):
    """Causal attention with two head sizes, which Megatron's local one does not support."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any):
        rows = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*rows, is_causal=True, scale=self.scale).permute(2, 0, 1, 3).flatten(2)


class NormColumn(torch.nn.Module):
    """MindSpeed's column-parallel layer with norm, as far as the wrappers use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from megatron.core.tensor_parallel import layers

        super().__init__()
        column = layers.ColumnParallelLinear(*args, **kwargs)
        vars(self).update({k: v for k, v in vars(column).items() if not k.startswith("_")})
        self.weight, self.bias = column.weight, column.bias
        self.norm_weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, column.input_size))
        self._linear_forward_impl = layers.linear_with_grad_accumulation_and_async_allreduce

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        y = self._linear_forward_impl(
            input=torch.nn.functional.rms_norm(x, x.shape[-1:], self.norm_weight),
            weight=self.weight,
            bias=self.bias,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=self.allreduce_dgrad,
            sequence_parallel=self.sequence_parallel,
            grad_output_buffer=None,
            wgrad_deferral_limit=None,
        )
        return y, None


def settings(case: Case) -> Any:
    """Megatron's configuration, with the options of MindSpeed as more attributes."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from scripts.cpu_pretraining.model import transformer_config

    latent = "multi_latent_attention" in case.options
    kind = MLATransformerConfig if latent else TransformerConfig
    config = transformer_config(case.args(), kind)
    known = {one.name for one in fields(kind)}
    vars(config).update({name: case.options[name] for name in case.options.keys() - known})
    return config


def gpt(case: Case, config: Any, chunk: int = 0) -> torch.nn.Module:
    """One model chunk of this rank; no bias is 0, and no weight of a norm is 1."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from scripts.cpu_pretraining.model import RMSNorm
    from scripts.cpu_pretraining.ulysses_attention import UlyssesAttention

    latent = "multi_latent_attention" in case.options
    spec = get_gpt_layer_local_spec(config.num_moe_experts, multi_latent_attention=latent)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention
    attention.params = {"attn_mask_type": AttnMaskType[case.mask]}
    parts = attention.submodules
    if latent:
        parts.core_attention, parts.q_layernorm, parts.kv_layernorm = Core, RMSNorm, RMSNorm
    if case.norms:
        parts.q_layernorm = parts.k_layernorm = RMSNorm
    if case.context > 1:
        parts.core_attention = UlyssesAttention
    if case.norm_column:
        parts.linear_qkv = NormColumn
    if case.virtual and not supported_keywords(GPTModel, vp_stage=chunk):
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if case.pattern is not None:
        return hybrid(case, config, spec.submodules, stage)
    layers = config.num_layers // (case.stages * case.chunks)
    model = GPTModel(
        config,
        TransformerBlockSubmodules([spec] * layers, RMSNorm),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=(stage, chunk) == (0, 0),
        post_process=(stage, chunk) == (case.stages - 1, case.chunks - 1),
        position_embedding_type="none" if latent or case.rotary == "none" else "rope",
        share_embeddings_and_output_weights=case.tied,
        **supported_keywords(GPTModel, vp_stage=chunk if case.virtual else None),
    )
    if not case.typed:
        model.model_type = None
    return trainable(case, model)


def hybrid(case: Case, config: Any, parts: Any, stage: int) -> torch.nn.Module:
    """A hybrid model of core 0.18 and later, of the parts of a GPT layer."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from scripts.cpu_pretraining.model import RMSNorm

    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )
    layers = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(TransformerLayer, submodules=mlp),
    )
    with mock.patch.object(hybrid_block, "TENorm", RMSNorm):
        model = HybridModel(
            config,
            ModuleSpec(hybrid_block.HybridStack, submodules=layers),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            hybrid_layer_pattern=case.pattern,
            pre_process=stage == 0,
            post_process=stage == case.stages - 1,
            position_embedding_type="rope",
        )
    return trainable(case, model)


def trainable(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights that differ from those of its construction."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(case.frozen is None or case.frozen not in name)
        weight.data.add_(torch.randn_like(weight) * 0.1)
    return model
