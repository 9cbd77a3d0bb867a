"""A layer of Megatron's GPT model under tensor parallelism, as operations of one rank.

Legend: ``S`` sequence of a context-parallel rank, ``B`` micro-batch, ``H`` hidden, ``F``
feed-forward, ``n`` tensor-parallel ranks.  All widths below are those of one rank, ``1/n``::

    forward   norm | x arrives -> qkv | rotary | attention | proj -> sum | norm
                   | x arrives -> fc1 | SwiGLU | fc2 -> sum
    backward  in reverse order: gradients arrive -> dgrad, wgrad of fc2 and proj; dgrad -> sum,
              x arrives again -> wgrad of fc1 and qkv

Attention (causal, forward) takes ``2 * B * S^2 * H`` FLOP over all ranks: two products over half of
the scores.  Its backward takes 2.5 times as many: five products instead of two, because flash
attention recomputes the scores.  Element-wise work costs its memory traffic.  Latent attention
replaces qkv and context parallelism adds transfers to attention (:mod:`.attention_layers`), experts
(:mod:`.experts`) replace the feed-forward part.  Without sequence parallelism every rank has all
rows.

Launches are those of Megatron core 0.12.1 with the kernels that MindSpeed-LLM's launches select
(one each for RMS norm, rotary embedding, SwiGLU and attention in each direction, and a separate
addition of gradients to ``main_grad``): 33 forward and 33 backward, counted on a CPU
(``tests/megatron/test_launches.py``).
"""

from dataclasses import dataclass
from functools import partial

from commfuse_npu.tools.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate import linear_layers
from commfuse_npu.tools.simulate.attention_layers import Latent, attend
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.lora import Lora, Weight, adapt
from commfuse_npu.tools.simulate.rank import Rank, rest
from commfuse_npu.tools.simulate.variants import MEGATRON

_ROTARY = 19, 7
"""Launches that split queries, keys and values and apply the rotary embedding, forward and
backward: MindSpeed recomputes cosines and sines for queries and for keys."""
_NORM = 3
"""Launches of a norm's backward: itself, the sum with the residual's and its weight's gradient."""
_ADDED = 2
"""Launches per half of a layer that add the gradients of its two weights to earlier ones."""
_LOSS = 20, 8
"""Launches of a cross entropy over a split vocabulary, forward and backward."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer for one tensor-parallel group.

    Attributes:
        sequence: tokens of a sequence on one context-parallel rank.
        attended: tokens of the full sequence, over all context-parallel ranks.
        batch: sequences of a micro-batch.
        hidden, feed_forward, qkv, vocabulary: full widths, over all tensor-parallel ranks.
        ranks: of the tensor-parallel group; it divides all of these widths.
        heads: width of all query heads; 0 if it equals that of the hidden states.
        groups: query groups of the model.
        sequence_parallel: whether a rank has only a block of the rows outside of linear layers.
        halves: outputs of the first feed-forward product per unit of width: 2 if it is gated
            (SwiGLU), else 1.
        causal: whether a query sees only the keys up to its own position.
        ulysses: whether context parallelism exchanges heads instead of circulating keys.
        latent, experts: replace queries, keys and values, and the feed-forward part.
        lora: adapters, if all other weights are frozen.
        free: groups whose transfers are left out, to find what they cost: ``tp``, ``cp``, ``ep``,
            ``dp``, ``pp``.
    """

    sequence: int
    attended: int
    batch: int
    hidden: int
    feed_forward: int
    qkv: int
    vocabulary: int
    ranks: int
    heads: int = 0
    groups: int = 1
    sequence_parallel: bool = True
    halves: int = 2
    causal: bool = True
    ulysses: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    lora: Lora | None = None
    free: tuple[str, ...] = ()

    @property
    def contexts(self) -> int:
        """Number of context-parallel ranks."""
        return self.attended // self.sequence

    @property
    def inner(self) -> int:
        """Width of one rank's query heads, the input of the output projection."""
        return (self.heads or self.hidden) // self.ranks

    @property
    def key_value(self) -> int:
        """Full width of the keys, or of the values."""
        return (self.qkv - (self.heads or self.hidden)) // 2

    @property
    def dense(self) -> int:
        """Feed-forward width on one rank for all tokens; with experts, that of the shared ones."""
        shared = self.experts.shared if self.experts else self.feed_forward
        return shared // self.ranks

    @property
    def weights(self) -> list[Weight]:
        """The weights of the linear layers, of latent attention its narrow product's."""
        h = self.hidden
        ends = self.held, self.rows
        qkv = Weight("qkv", h, self.qkv // self.ranks, ends)
        if self.latent:
            qkv = Weight("qkv", h, self.latent.narrow, (self.held, self.held), split=False)
        weights = [qkv, Weight("proj", self.inner, h, ends[::-1])]
        if self.dense:
            weights += [
                Weight("fc1", h, self.halves * self.dense, ends),
                Weight("fc2", self.dense, h, ends[::-1]),
            ]
        if experts := self.experts:
            sent = self.held * experts.each * experts.tensor
            weights += [
                Weight(*layer, (sent, sent), experts.local, split=False)
                for layer in experts.layers(h)
            ]
        return weights

    @property
    def rows(self) -> int:
        """Rows of the full activation."""
        return self.sequence * self.batch

    @property
    def block(self) -> int:
        """Rows of one rank's block under sequence parallelism."""
        return self.rows // self.ranks

    @property
    def held(self) -> int:
        """Rows that one rank has outside of linear layers."""
        return self.block if self.sequence_parallel else self.rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of hidden states; only such rows are transferred."""
        return self.hidden * ITEM_BYTES

    def parameters(self, trained: bool = False) -> tuple[float, float]:
        """Parameters per NPU in a layer: those used by all tokens, and those of its experts.

        Args:
            trained: with frozen weights, those of adapters instead.
        """
        h = self.hidden
        lora = self.lora if trained else None
        own = of_experts = 0.0
        if not lora:
            own = 2.0 * h + (h * self.experts.number if self.experts else 0)
            if latent := self.latent:
                per_feature, besides = latent.parameters
                own += (h * per_feature + besides) / self.ranks - h * (latent.narrow + self.inner)
        for weight in self.weights:
            size = weight.inputs * weight.outputs
            if lora:
                narrow = lora.rank if lora.adapts(weight.name) else 0
                size = narrow * (weight.inputs + weight.outputs)
            own += 0 if weight.experts else size
            of_experts += weight.experts * size
        return own, of_experts

    @property
    def multiplications(self) -> float:
        """Multiplications per token in the forward of a layer."""
        h = self.hidden
        queries = self.inner * self.ranks
        attention = float(h * (self.qkv + queries) + self.attended * queries)
        if latent := self.latent:
            per_feature, besides = latent.parameters
            attention = h * per_feature + besides + self.attended * latent.attended / 2
        width = float(self.dense * self.ranks)
        if experts := self.experts:
            width += experts.each * experts.width
        return attention + h * (self.halves + 1) * width

    def attention(self, machine: Machine, factor: float = 1.0) -> float:
        """Seconds of attention on one rank, times ``factor``.

        Under context parallelism a rank has the queries of a part of the sequence, or with Ulysses
        those of the full sequence for some heads.
        """
        widths = self.latent.attended if self.latent else 2.0 * (self.heads or self.hidden)
        parts = self.ranks * self.contexts
        flops = self.batch * self.attended**2 * widths / parts * (1 if self.causal else 2)
        queries = self.attended if self.ulysses else self.sequence
        return machine.attention(flops * factor) * (1 + machine.half_rows / queries)


def _set_up(rank: Rank, shape: LayerShape) -> None:
    rank.sequence_parallel = shape.sequence_parallel
    rank.lora = shape.lora
    if shape.lora and shape.lora.fused and rank.variant.kind not in ("compute", "plain", "passes"):
        rank.variant = MEGATRON
    rank.free = shape.free


def forward(rank: Rank, shape: LayerShape, *, whole: bool = True) -> None:
    """Add a layer's forward.

    Args:
        whole: whether the sum of fc2 is needed.
    """
    rows = shape.rows
    block = shape.block
    held = shape.held
    h = shape.hidden
    qkv = shape.qkv // shape.ranks
    width = shape.dense
    _set_up(rank, shape)
    rank.elementwise("norm", 2 * held * h)
    if shape.latent:
        shape.latent.forward(rank, rows, held, h)
    else:
        linear_layers.column(rank, "qkv", block, h, qkv)
    rank.elementwise("rotary", 2 * rows * qkv, _ROTARY[0])
    attend(rank, shape, 0)
    linear_layers.row(rank, "proj", block, shape.inner, h)
    rank.elementwise("residual, norm", 4 * held * h, 2)
    if shape.experts:
        shape.experts.forward(rank, held, h)
    if width:
        linear_layers.column(rank, "fc1", block, h, shape.halves * width)
        rank.elementwise("activation", rows * (shape.halves + 1) * width)
        if whole:
            linear_layers.row(rank, "fc2", block, width, h)
    rank.elementwise("residual", 3 * held * h)
    adapt(rank, shape)


recomputation = partial(forward, whole=False)
"""Adds a forward that is run again for what the gradients read: the sum of fc2 is not."""


def backward(rank: Rank, shape: LayerShape) -> None:
    """Add a layer's backward."""
    rows = shape.rows
    block = shape.block
    held = shape.held
    h = shape.hidden
    qkv = shape.qkv // shape.ranks
    width = shape.dense
    norm = _NORM - 1 if shape.lora else _NORM + _ADDED
    _set_up(rank, shape)
    if shape.experts:
        shape.experts.backward(rank, held, h)
    if width:
        fc1 = linear_layers.column_gradients(rank, "fc1 backward", block, h, shape.halves * width)
        linear_layers.row_gradients(rank, "fc2 backward", block, width, h, fc1)
        rank.elementwise("activation backward", rows * (2 * shape.halves + 1) * width)
        rest(fc1)
    rank.elementwise("norm backward", 4 * held * h, norm)
    qkv_gradients = linear_layers.column_gradients(rank, "qkv backward", block, h, qkv)
    before = None if shape.latent else qkv_gradients
    linear_layers.row_gradients(rank, "proj backward", block, shape.inner, h, before)
    attend(rank, shape, 1)
    rank.elementwise("rotary backward", 2 * rows * qkv, _ROTARY[1])
    if shape.latent:
        shape.latent.backward(rank, rows, held, h)
    else:
        rest(qkv_gradients)
    rank.elementwise("norm backward", 4 * held * h, norm)
    adapt(rank, shape, backward=True)


def head_forward(rank: Rank, shape: LayerShape) -> None:
    """Add the final norm, the output layer and the loss.

    Per logit the loss reads and writes 38 bytes (to fp32; maximum, difference, exponential, sum,
    quotient), its backward 14 (times the gradient; to bf16): read in Megatron core 0.12.1.
    """
    v = shape.vocabulary // shape.ranks
    _set_up(rank, shape)
    rank.elementwise("norm", 2 * shape.held * shape.hidden)
    linear_layers.column(rank, "output", shape.block, shape.hidden, v)
    rank.elementwise("loss", 19 * shape.rows * v, _LOSS[0])


def head_backward(rank: Rank, shape: LayerShape) -> None:
    """Add the backward of :func:`head_forward`."""
    v = shape.vocabulary // shape.ranks
    _set_up(rank, shape)
    rank.elementwise("loss backward", 7 * shape.rows * v, _LOSS[1])
    rest(linear_layers.column_gradients(rank, "output backward", shape.block, shape.hidden, v))
    rank.elementwise("norm backward", 4 * shape.held * shape.hidden)
