"""A model in its layout: a training, and the layers of each pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from commfuse_npu.config_file import ConfigError
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.context_parallel import ContextParallel
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.latent import Latent
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.pipeline import interleaves

__all__ = ["Kind", "Layout", "Recompute", "Training", "training"]

Recompute = Literal["none", "full"]

Kind = Literal["dense", "experts", "none"]
"""Kind of layer; ``none`` passes on its input (MindSpeed-LLM's ``--noop-layers``)."""


class Layout(NamedTuple):
    """Parallel sizes; ``vpp``: chunks of layers per pipeline stage, interleaved if above 1."""

    tp: int
    cp: int
    dp: int
    pp: int
    vpp: int = 1

    @property
    def npus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True)
class Training:
    """A model and how it is trained.

    Attributes:
        model: with the layout, the sequence length and the batch of this training.
        vpp: chunks of layers per pipeline stage; they divide the layers of every stage.
        recomputed: with full recomputation, number of layers per stage whose forward is run again;
            ``None``: all.
        kinds: of each layer of the model; empty: all are dense.
        experts, latent, head, gated, causal, sequence_parallel: as in
            :class:`~.llama.LayerShape`; ``head`` is the width of one, 0: hidden size / heads.
        distributed: whether optimizer states are divided over the data-parallel ranks.
        overlaps: whether gradients are reduced during the backward, and parameters gathered during
            the forward.
        reuses: whether the bf16 weights are part of the fp32 ones (``--reuse-fp32-param``).
        gradient_bytes: per gradient element.
    """

    model: ModelConfig
    recompute: Recompute = "none"
    vpp: int = 1
    recomputed: int | None = None
    kinds: tuple[Kind, ...] = ()
    experts: Experts | None = None
    latent: Latent | None = None
    head: int = 0
    gated: bool = True
    causal: bool = True
    sequence_parallel: bool = True
    distributed: bool = True
    overlaps: tuple[bool, bool] = (True, True)
    reuses: bool = False
    gradient_bytes: int = 4

    @property
    def layout(self) -> Layout:
        model = self.model
        return Layout(
            model.tensor_model_parallel_size,
            model.context_parallel_size,
            model.data_parallel_size,
            model.pipeline_model_parallel_size,
            self.vpp,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of every pipeline stage."""
        stages = self.model.pipeline_model_parallel_size
        return self.model.num_layer_list or (self.model.num_layers // stages,) * stages

    @cached_property
    def places(self) -> tuple[Mapping[Kind, float], ...]:
        """Number of layers of each kind in every chunk, in model order."""
        if not self.kinds:
            stages: list[Mapping[Kind, float]]
            stages = [{"dense": count / self.layout.vpp} for count in self.layers]
            return (*stages,) * self.layout.vpp
        places: list[Mapping[Kind, float]] = []
        start = 0
        for count in [count // self.layout.vpp for count in self.layers] * self.layout.vpp:
            places.append(dict(Counter(self.kinds[start : start + count])))
            start += count
        return tuple(places)

    def of_stage(self, stage: int) -> Mapping[Kind, float]:
        """Number of layers of each kind in a pipeline stage."""
        counts: dict[Kind, float] = {}
        for place in self.places[stage :: self.layout.pp]:
            for kind, count in place.items():
                counts[kind] = counts.get(kind, 0) + count
        return counts

    def recomputed_share(self, place: int) -> float:
        """Share of a chunk's layers whose forward is run again in the backward."""
        if not self.recomputes or self.recomputed is None:
            return float(self.recomputes)
        layers = sum(self.places[place].values())
        return min(1.0, self.recomputed / self.layout.vpp / max(1.0, layers))

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and data-parallel replica."""
        return self.model.global_batch_size // (self.model.micro_batch_size * self.layout.dp)

    @property
    def recomputes(self) -> bool:
        """Whether full recomputation runs each layer's forward again before its backward."""
        return self.recompute == "full"

    def tokens_per_second(self, seconds: float) -> float:
        """Tokens per second and NPU, if a step takes ``seconds``."""
        tokens = self.model.seq_length * self.model.global_batch_size
        return tokens / (seconds * self.layout.npus)

    def parameters_of(self, kind: Kind) -> tuple[float, float]:
        """Parameters per NPU in a layer: those used by all tokens, and those of its experts."""
        model, shape = self.model, self.shape_of(kind)
        if kind == "none":
            return 0.0, 0.0
        h, tp = model.hidden_size, self.layout.tp
        if self.latent:
            per_feature, besides = self.latent.parameters
            attention = h * per_feature + besides
        else:
            attention = h * (shape.qkv + shape.inner * tp)
        dense = h * (shape.halves + 1) * shape.dense * tp + attention
        own = self.experts.parameters(h) if kind == "experts" and self.experts else 0.0
        router = h * self.experts.number if own and self.experts else 0.0
        return dense / tp + router + 2 * h, own

    def of_layers(self, stage: int) -> tuple[float, float]:
        """:meth:`parameters_of`, summed over all layers of a pipeline stage."""
        everyone = experts = 0.0
        for kind, count in self.of_stage(stage).items():
            own, of_experts = self.parameters_of(kind)
            everyone, experts = everyone + count * own, experts + count * of_experts
        return everyone, experts

    def with_states(self, everyone: float, experts: float) -> float:
        """Number of one NPU's parameters whose optimizer states it holds."""
        if not self.distributed:
            return everyone + experts
        return everyone / (self.layout.dp * self.layout.cp) + experts / self.expert_replicas

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that have the same experts."""
        if self.experts is None:
            return 1
        layout, experts = self.layout, self.experts
        return layout.tp * layout.cp * layout.dp // (experts.parallel * experts.tensor)

    @property
    def expert_stride(self) -> int:
        """Distance in NPUs between ranks that have the same experts."""
        return self.experts.parallel * self.experts.tensor if self.experts else 1

    def shape_of(self, kind: Kind) -> LayerShape:
        return replace(self.shape, experts=self.experts) if kind == "experts" else self.shape

    @property
    def shape(self) -> LayerShape:
        """The shape of a layer without experts."""
        model = self.model
        return LayerShape(
            sequence=model.seq_length // model.context_parallel_size,
            attended=model.seq_length,
            batch=model.micro_batch_size,
            hidden=model.hidden_size,
            feed_forward=model.ffn_hidden_size,
            qkv=self._qkv,
            vocabulary=model.padded_vocab_size,
            ranks=model.tensor_model_parallel_size,
            heads=self._heads,
            sequence_parallel=self.sequence_parallel,
            gated=self.gated,
            causal=self.causal,
            latent=self.latent,
            context=self._context,
        )

    @property
    def _context(self) -> ContextParallel | None:
        model = self.model
        if model.context_parallel_size == 1:
            return None
        head = self.head or model.hidden_size // model.num_attention_heads
        return ContextParallel(
            size=model.context_parallel_size,
            ranks=model.tensor_model_parallel_size,
            key_value=head * model.num_query_groups,
            groups=model.num_query_groups,
            ulysses=model.context_parallel_algo == "ulysses_cp_algo",
        )

    @property
    def _heads(self) -> int:
        if self.latent is not None:
            return self.latent.heads * self.latent.value
        return self.head * self.model.num_attention_heads

    @property
    def _qkv(self) -> int:
        """Width of queries, keys and values; with latent attention, of the rotary parts."""
        if self.latent is not None:
            return 2 * self.latent.heads * self.latent.rotary
        if self.head:
            return self.head * (self.model.num_attention_heads + 2 * self.model.num_query_groups)
        return self.model.qkv_size


def training(
    model: ModelConfig,
    layout: Layout,
    sequence: int | None = None,
    *,
    micro_batch: int | None = None,
    micro_batches: int | None = None,
    recompute: Recompute = "none",
) -> Training:
    """The simulator's description of a training: a model in a layout.

    Args:
        sequence, micro_batch: tokens and sequences; the model's by default.
        micro_batches: per step and replica; by default what the model's global batch gives.

    Raises:
        ConfigError: they do not fit each other; one line per problem, with value and limit.
    """
    sequence = sequence or model.seq_length
    micro_batch = micro_batch or model.micro_batch_size
    global_batch = model.global_batch_size
    if micro_batches is not None:
        global_batch = micro_batch * micro_batches * layout.dp
    stages = model.num_layer_list if layout.pp == model.pipeline_model_parallel_size else None
    fitted = replace(
        model,
        seq_length=sequence,
        max_position_embeddings=max(sequence, model.max_position_embeddings),
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=model.sequence_parallel or layout.tp > 1,
        num_layer_list=stages,
        npus_per_node=layout.npus,
        nnodes=1,
    )
    fitted.validate()
    setup = Training(fitted, recompute, layout.vpp)
    if layout.vpp > 1 and (layout.pp == 1 or any(count % layout.vpp for count in setup.layers)):
        raise ConfigError(
            f"{layout.vpp} chunks do not divide the layers of {layout.pp} pipeline stages, "
            f"{', '.join(map(str, sorted(set(setup.layers))))}; choose another number of chunks"
        )
    if not interleaves(layout.pp, layout.vpp, setup.micro_batches):
        raise ConfigError(
            f"{setup.micro_batches} micro-batches are not divisible by {layout.pp} pipeline "
            "stages, as the interleaved schedule wants; choose another global batch or 1 chunk"
        )
    return setup
