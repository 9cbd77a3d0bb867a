"""Small GPTs of the real Megatron, trained in the ranks of a test with CommFuse or without."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from commfuse_npu.runtime.collective_transport import CollectiveTransport
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.fb_overlap.core_versions import supported_keywords
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes
from mindspeed_patches.training_options import register_wrappers
from tests.attention_masks import ends_of, seen
from tests.megatron.in_ranks import WITHOUT_KERNELS, NormColumn, megatron
from tests.patches.launches import real_arguments

LENGTH, BATCH, VOCABULARY = 16, 2, 64
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
"""Options of Megatron's configuration."""


@dataclass(frozen=True)
class Case:
    """The layout of a training, its model, and what of it is fused.

    Attributes:
        context: ranks that share a sequence and exchange heads.
        launch: the options of CommFuse.
        config: of Megatron's configuration, and what MindSpeed adds to it.
        ddp: of Megatron's buckets; ``optimizer``: of Adam.
        distributed: the distributed optimizer, with both of its overlaps unless ``ddp`` says no.
        mask: Megatron's kind of mask.
        rotary: Megatron's embeddings of positions (``rope``), other ones for keys (``two``), or
            ``none``.
        norms: of queries and keys; ``norm_column``: the layer before them has a norm, too.
        tied: embedding and output layer have the same weight.
        frozen: a part of the names of weights that are not trained.
        groups: pass the process groups, as later versions allow.
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
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    distributed: bool = False
    mask: str = "causal"
    rotary: str = "rope"
    norms: bool = False
    norm_column: bool = False
    tied: bool = False
    frozen: str | None = None
    groups: bool = False
    typed: bool = True

    @property
    def size(self) -> int:
        return self.tensor * self.context * self.stages * self.replicas

    @property
    def documents(self) -> bool:
        """Whether a sequence has several, which MindSpeed packs and Megatron expects as a mask."""
        return "reset_attention_mask" in self.config

    @property
    def virtual(self) -> int | None:
        return self.chunks if self.chunks > 1 else None


class Core(torch.nn.Module):
    """Causal attention with two head sizes, which Megatron's local one does not support."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any):
        rows = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*rows, is_causal=True, scale=self.scale).permute(2, 0, 1, 3).flatten(2)


def layout(case: Case, minutes: float = 3) -> contextlib.AbstractContextManager[None]:
    """Megatron's groups of a case, with this timeout."""
    return megatron(
        case.tensor,
        case.context,
        minutes,
        pipeline_model_parallel_size=case.stages,
        virtual_pipeline_model_parallel_size=case.virtual,
        expert_model_parallel_size=case.experts,
    )


@contextlib.contextmanager
def launched(
    case: Case, collectives: bool = False, minutes: float = 3
) -> Iterator[tuple[LinearWrappers, StartReport]]:
    """Wraps what the launch asks for, over lanes with this timeout or over collectives."""
    args = real_arguments(
        *case.launch.split(),
        transformer_impl="local",
        tensor_model_parallel_size=case.tensor,
        context_parallel_size=case.context,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
    )
    manager, exchange = PatchManager(), "scripts.cpu_pretraining.ulysses.UlyssesAttention"
    linears, users, report = register_wrappers(manager, args, ulysses_attention=exchange)
    with contextlib.ExitStack() as undone:
        for user in users:
            user.open(minutes)
            undone.callback(user.close)
            if collectives:
                user.transport = CollectiveTransport(user.lanes().group, same_pieces=True)
        manager.apply_patches()
        undone.callback(manager.remove_patches)
        if case.tensor > 1:
            init = linears.norm_column_init_wrapper(NormColumn.__init__)
            undone.enter_context(mock.patch.object(NormColumn, "__init__", init))
        yield linears, report


def told(report: StartReport, models: Any) -> list[str]:
    """The lines of the report, which only rank 0 prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        report.tell(models)
    return out.getvalue().splitlines()


def settings(case: Case) -> Any:
    """Megatron's configuration, with one layer per chunk unless the case has another number."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    given = {
        "num_layers": case.stages * case.chunks,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "pipeline_dtype": case.dtype,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": case.chunks > 1,
        "tensor_model_parallel_size": case.tensor,
        "context_parallel_size": case.context,
        "pipeline_model_parallel_size": case.stages,
        "virtual_pipeline_model_parallel_size": case.virtual,
        "expert_model_parallel_size": case.experts,
        "sequence_parallel": case.tensor > 1,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "init_method_std": 0.3,
        **WITHOUT_KERNELS,
        **case.config,
    }
    kind = MLATransformerConfig if "multi_latent_attention" in given else TransformerConfig
    own = {one.name for one in fields(kind)}
    config = kind(**{name: value for name, value in given.items() if name in own})
    vars(config).update({name: value for name, value in given.items() if name not in own})
    return config


def gpt(case: Case, config: Any, chunk: int = 0) -> torch.nn.Module:
    """One model chunk of this rank; no bias is 0, and no weight of a norm is 1."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from scripts.cpu_pretraining.model import RMSNorm
    from scripts.cpu_pretraining.ulysses import UlyssesAttention

    latent = "multi_latent_attention" in case.config
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
    for name, weight in model.named_parameters():
        weight.requires_grad_(case.frozen is None or case.frozen not in name)
        weight.data.add_(torch.randn_like(weight) * 0.1)
    return model


class Trainer:
    """The model chunks of this rank, and their optimizer.

    Args:
        packed: documents are passed as MindSpeed does.
    """

    def __init__(self, case: Case, packed: bool = False) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel as Wrapped
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        self.case, self.packed, self.config = case, packed, settings(case)
        nets = [gpt(case, self.config, chunk) for chunk in range(case.chunks)]
        names = "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"
        given = dict.fromkeys(names, case.distributed) | {"grad_reduce_in_fp32": True} | case.ddp
        ddp = DistributedDataParallelConfig(**given)
        self.models = [
            Wrapped(self.config, ddp, net, disable_bucketing=chunk > 0)
            for chunk, net in enumerate(nets)
        ]
        dtype = {"bf16": case.dtype == torch.bfloat16, "params_dtype": case.dtype}
        adam = {"optimizer": "adam", "lr": 0.01, "use_distributed_optimizer": case.distributed}
        options = OptimizerConfig(**adam | dtype | case.optimizer)
        self.optimizer = get_megatron_optimizer(options, self.models)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.noted = [mock.Mock(wraps=model.no_sync) for model in self.models]
        self.config.no_sync_func = self._each(self.noted)
        if ddp.overlap_grad_reduce:
            starts = [mock.Mock(wraps=model.start_grad_sync) for model in self.models]
            self.config.grad_sync_func = self._each(starts)
            self.noted = [*self.noted, *starts]
        self.overlaps_gathers = ddp.overlap_param_gather
        if self.overlaps_gathers and case.virtual:
            self.config.param_sync_func = [model.start_param_sync for model in self.models]
        seed = 7 + parallel_state.get_data_parallel_rank()
        self.data = [self._batches(seed) for _ in self.models]
        rows = LENGTH // case.context
        first = parallel_state.get_context_parallel_rank() * rows
        self.rows = slice(first, first + rows)
        self._set_positions(nets[0])
        self.losses: list[torch.Tensor] = []

    def _each(self, items: list[Any]) -> Any:
        return items if self.case.virtual else items[0]

    @staticmethod
    def _batches(seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)

    def _set_positions(self, net: Any) -> None:
        """Embeddings of positions in the case's form; of documents as MindSpeed has them."""
        case, rope = self.case, getattr(net, "rotary_pos_emb", None)
        self.numbers = torch.arange(LENGTH).repeat(BATCH)
        first = 0
        resets = case.config.get("reset_position_ids", False)
        for end in ends_of("documents", LENGTH, BATCH) if resets else ():
            self.numbers[first:end] = torch.arange(end - first)
            first = end
        self.numbers = self.numbers.view(BATCH, LENGTH).t()[self.rows].contiguous()
        if rope is None:
            return
        own = rope.forward
        if case.documents:
            table = own(LENGTH, packed_seq=True)
            picked = table[self.numbers.flatten()].view(-1, BATCH, 1, table.shape[-1])
            own = lambda *_, **__: table if self.packed else picked  # noqa: E731
        if case.rotary == "two":
            rope.forward = lambda *given, **more: (own(*given, **more), 0.5 * own(*given, **more))
        else:
            rope.forward = own

    def forward(self, data: Iterator[torch.Tensor], model: Any, *partly: bool) -> Any:
        """Megatron's ``forward_step_func``."""
        case, batch, packed = self.case, next(data), {}
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        if case.documents or case.config.get("attention_mask_type") == "general":
            mask = ~seen("documents", LENGTH, BATCH)
        if self.packed:
            ends = torch.tensor(ends_of("documents", LENGTH, BATCH))
            lengths = {"max_seqlen_q": LENGTH, "max_seqlen_kv": LENGTH, "qkv_format": "sbhd"}
            packed["packed_seq_params"] = SimpleNamespace(
                cu_seqlens_q=ends, position_ids=self.numbers, **lengths
            )
        tokens, labels = (
            whole[:, self.rows].contiguous() for whole in (batch[:, :-1], batch[:, 1:])
        )
        positions = torch.arange(LENGTH).expand(BATCH, -1)[:, self.rows]
        causal = case.mask == "causal" and not self.packed
        output = model(tokens, positions, mask if causal else None, labels=labels, **packed)

        def loss(output: torch.Tensor) -> Any:
            mean = output.float().mean()
            return mean, {"lm loss": mean.detach().clone()}

        return output, loss

    def accumulate(self, forward_only: bool = False) -> None:
        """All micro-batches of a step, in the schedule that Megatron chooses."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.zero_grad_buffer()
            model.train(not forward_only)
        self.optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=self._each(self.data),
            model=self._each(self.models),
            num_microbatches=self.case.microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            **(self._groups() if self.case.groups else {}),
        )
        self.losses += [loss["lm loss"] for loss in reduced]

    def step(self) -> None:
        self.accumulate()
        updated, _, _ = self.optimizer.step()
        assert updated

    def finish_parameters(self) -> None:
        """Wait for the gathers that are overlapped with the next forward."""
        for model in self.models if self.overlaps_gathers else ():
            model.disable_forward_pre_hook(param_sync=True)
            model.enable_forward_pre_hook()

    def sha256(self) -> str:
        """Hashes of parameters, main parameters and optimizer state of this rank."""
        weights = sorted(weight_hashes([model.module for model in self.models]).items())
        return f"{weights} {optimizer_hash(self.optimizer)}"

    def weights(self) -> dict[str, torch.Tensor]:
        named = (item for model in self.models for item in model.module.named_parameters())
        return {f"{number} {name}": p for number, (name, p) in enumerate(named)}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Losses and gradients, summed over the replicas."""
        trained = {name: p.main_grad for name, p in self.weights().items() if p.requires_grad}
        return {f"loss {number}": loss for number, loss in enumerate(self.losses)} | trained

    def _groups(self) -> dict[str, Any]:
        """Arguments of a caller with its own groups; empty if the version does not take them."""
        try:
            from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
            from megatron.core.process_groups_config import ProcessGroupCollection
        except ImportError:
            return {}
        groups = ProcessGroupCollection.use_mpu_process_groups()
        own = P2PCommunicator(groups.pp, self.config)
        return {"p2p_communicator": own, "pg_collection": groups}
