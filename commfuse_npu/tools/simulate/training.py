"""A model in its layout: a training, and the layers of each pipeline stage."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple

from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.attention_layers import Latent
from commfuse_npu.tools.simulate.llama import LayerShape

Kind = Literal["dense", "experts", "none"]
"""Kind of layer; ``none`` passes on its input (MindSpeed-LLM's ``--noop-layers``)."""
_KINDS: tuple[Kind, ...] = ("dense", "experts")
"""Those that do something, in the order of a model."""


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
        shape: of a layer; its experts only in layers of this kind.
        kinds: of each layer of the model.
        recomputed: number of layers per stage whose forward is run again before their backward.
        vpp: chunks of layers per pipeline stage; they divide the layers of every stage.
        distributed: whether optimizer states are divided over the data-parallel ranks.
        overlaps: whether gradients are reduced during the backward, and parameters gathered during
            the forward.
        reuses: whether the bf16 weights are part of the fp32 ones (``--reuse-fp32-param``).
        gradient_bytes: per gradient element.
        batch_launches: host launches that make a micro-batch for a chunk while the device waits.
        shapes: whether stages exchange shapes, and wait for them, before every transfer.
    """

    model: ModelConfig
    shape: LayerShape
    kinds: tuple[Kind, ...]
    recomputed: int = 0
    vpp: int = 1
    distributed: bool = True
    overlaps: tuple[bool, bool] = (True, True)
    reuses: bool = False
    gradient_bytes: int = 4
    batch_launches: int = 0
    shapes: bool = False

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
    def places(self) -> tuple[Counter[Kind], ...]:
        """Number of layers of each kind in every chunk, in model order."""
        kinds = iter(self.kinds)
        counts = [count // self.vpp for count in self.layers] * self.vpp
        return tuple(Counter(islice(kinds, count)) for count in counts)

    def by_shape(self, kinds: Counter[Kind]) -> dict[LayerShape, int]:
        """Number of layers by their shape, without those that do nothing."""
        return {self.shape_of(kind): kinds[kind] for kind in _KINDS if kinds[kind]}

    def of_stage(self, stage: int) -> dict[LayerShape, int]:
        """:meth:`by_shape` of a pipeline stage."""
        return self.by_shape(sum(self.places[stage :: self.layout.pp], Counter[Kind]()))

    @property
    def recomputes(self) -> bool:
        """Whether any layers are recomputed."""
        return self.recomputed > 0

    def recomputed_layers(self, place: int) -> int:
        """Number of a chunk's layers whose forward is run again in the backward.

        MindSpeed spreads those of a stage over its chunks.
        """
        later_chunks = self.vpp - 1 - place // self.layout.pp
        return min(self.places[place].total(), (self.recomputed + later_chunks) // self.vpp)

    @property
    def recomputes_all(self) -> bool:
        """Whether all layers are recomputed, so that a micro-batch keeps only their inputs."""
        return self.recomputes and all(
            self.recomputed_layers(place) == layers.total()
            for place, layers in enumerate(self.places)
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and data-parallel replica."""
        return self.model.micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all replicas."""
        return self.model.seq_length * self.model.global_batch_size

    @property
    def flops(self) -> float:
        """FLOP of a step as Megatron counts them (``num_floating_point_operations``, core 0.12.1).

        Every product counts three times, without recomputation and also with frozen weights;
        attention as causal; routers, norms and layers without operation not at all.
        """
        layers = self.by_shape(Counter(self.kinds))
        per_token = sum(count * shape.multiplications for shape, count in layers.items())
        return 6.0 * self.tokens * (per_token + self.shape.hidden * self.shape.vocabulary)

    def shape_of(self, kind: Kind) -> LayerShape:
        return self.shape if kind == "experts" else replace(self.shape, experts=None)

    # ------------------------------------------------------------------- parameters

    @property
    def table(self) -> float:
        """Parameters per NPU of the embedding, or of the output layer."""
        return self.shape.vocabulary * self.shape.hidden / self.shape.ranks

    def tables(self, stage: int) -> int:
        """Number of the vocabulary's tables on a pipeline stage: embedding and output layer."""
        last = self.layout.pp - 1
        tied = not self.model.untie_embeddings_and_output_weights
        return (stage == 0) + (stage == last and not (tied and stage == 0))

    def parameters(self, stage: int, trained: bool = False) -> tuple[float, float]:
        """:meth:`.LayerShape.parameters` of a pipeline stage, with the vocabulary's tables.

        Args:
            trained: with frozen weights, those of adapters instead.
        """
        everyone = 0.0 if trained and self.shape.lora else self.tables(stage) * self.table
        experts = 0.0
        for shape, count in self.of_stage(stage).items():
            own, of_experts = shape.parameters(trained)
            everyone += count * own
            experts += count * of_experts
        return everyone, experts

    def with_states(self, stage: int) -> float:
        """Number of the parameters of an NPU of a stage whose optimizer states it holds."""
        everyone, experts = self.parameters(stage, trained=True)
        if not self.distributed:
            return everyone + experts
        return everyone / (self.layout.dp * self.layout.cp) + experts / self.expert_replicas

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that have the same experts."""
        layout = self.layout
        return layout.tp * layout.cp * layout.dp // self.expert_stride if self.shape.experts else 1

    @property
    def expert_stride(self) -> int:
        """Distance in NPUs between ranks that have the same experts."""
        experts = self.shape.experts
        return experts.parallel * experts.tensor if experts else 1


def layer_shape(
    model: ModelConfig, *, head: int = 0, latent: Latent | None = None, **more: Any
) -> LayerShape:
    """The shape of a model's layers in its layout.

    Args:
        head: width of one; 0: hidden size / heads.
        more: further attributes of the shape.
    """
    heads = model.num_attention_heads
    groups = model.num_query_groups
    head = head or model.hidden_size // heads
    inner = head * heads
    qkv = head * (heads + 2 * groups)
    if latent:
        # Of queries, keys and values only the rotary parts.
        inner = latent.heads * latent.value
        qkv = 2 * latent.heads * latent.rotary
    return LayerShape(
        sequence=model.seq_length // model.context_parallel_size,
        attended=model.seq_length,
        batch=model.micro_batch_size,
        hidden=model.hidden_size,
        feed_forward=model.ffn_hidden_size,
        qkv=qkv,
        vocabulary=model.padded_vocab_size,
        ranks=model.tensor_model_parallel_size,
        heads=inner,
        groups=groups,
        ulysses=model.context_parallel_algo == "ulysses_cp_algo",
        latent=latent,
        **more,
    )


def training(
    model: ModelConfig,
    layout: Layout,
    sequence: int | None = None,
    *,
    micro_batch: int | None = None,
    micro_batches: int | None = None,
    recomputes: bool = False,
) -> Training:
    """The simulator's description of a training: a model in a layout.

    Args:
        layout: its chunks divide the layers of every stage, and its stages the micro-batches.
        sequence, micro_batch: tokens and sequences; the model's by default.
        micro_batches: per step and replica; by default what the model's global batch gives.

    Raises:
        ConfigError: they do not fit each other; one line per problem, with value and limit.
    """
    sequence = sequence or model.seq_length
    micro_batch = micro_batch or model.micro_batch_size
    global_batch = model.global_batch_size
    if micro_batches:
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
    dense: Kind = "dense"
    kinds = (dense,) * fitted.num_layers
    recomputed = fitted.num_layers if recomputes else 0
    return Training(fitted, layer_shape(fitted), kinds, recomputed, layout.vpp)
