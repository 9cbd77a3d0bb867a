"""Ulysses context parallelism: its all-to-alls overlapped with attention and its projections.

MindSpeed puts the core attention of a layer into ``UlyssesContextAttention``.  It redistributes q,
k and v from rows of the sequence to heads in three all-to-alls, attends, and redistributes the
output in a fourth, without overlap.  This module wraps its ``forward`` and that of the layer around
it; the classes stay.  Each projection of a layer takes part in the exchange if it can:

==================  ======================================  =====================================
                    with its projection                     without
==================  ======================================  =====================================
forward, q k v      behind the projection to the heads of   one all-to-all instead of three:
                    later ranks, the own heads last         exposed
forward, output     behind the attention of later blocks,   behind the attention of later blocks
                    and the projection of the own heads
backward, output    behind the dgrad of later blocks, and   behind the backward of attention of
                    wgrad and attention of the own rows     the blocks before
backward, dq dk dv  behind the dgrad of the blocks before   one all-to-all: exposed
==================  ======================================  =====================================

A layer whose two projections both take part, and the names under which its calls are counted::

    linear_all_to_all -> norms, rotary embedding -> attention_all_to_all
         qkv                                             ulysses | proj

Norms and rotary embedding act on each row and head separately, so they give the same bits before or
after an exchange.  After it they need the positions of the full sequence
(:class:`.ulysses_layer.WholePositions`).  With packed documents MindSpeed keeps the embeddings of
the full sequence on every rank, and each layer picks those of its rows by position; in that case
the positions are gathered and the picking is done here.

:mod:`.ulysses_layer` has the requirements on a layer: full weights (a tensor-parallel group of
one), and for q, k and v a number of query groups that the ranks divide evenly.  If a projection
does not meet them, the reason is counted under ``qkv of ulysses`` or ``proj of ulysses``, and the
layer is fused without it.

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G``
key heads of all ranks of the group together, ``D`` features of a head, ``H`` hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commfuse_npu.ops import (
    LinearOptions,
    attention_all_to_all,
    linear_all_to_all,
)
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.runtime.collectives import all_to_all
from mindspeed_patches.attention import DeferredAttention
from mindspeed_patches.lanes import CONTEXT_PARALLEL, LaneUser
from mindspeed_patches.patching import around
from mindspeed_patches.softmax_attention import AttentionCall
from mindspeed_patches.ulysses_layer import (
    WholePositions,
    forward_arguments,
    layer_obstacle,
    picked,
    proj_obstacle,
    qkv_method,
    qkv_obstacle,
    replaced,
)
from mindspeed_patches.wrappers import PARTNER, LinearWrappers, Output, by_fusion, trained_bias

__all__ = [
    "MINDSPEED_ULYSSES",
    "UlyssesWrappers",
    "heads_to_rows",
    "innermost",
    "rows_to_heads",
    "scale_of",
]

MINDSPEED_ULYSSES = (
    "mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel"
    ".UlyssesContextAttention"
)

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v: ``[S, B, heads of this rank, D]``."""

_ATTENTION = "megatron.core.transformer.attention.Attention.forward"
_HEADS = ("num_attention_heads_per_partition", "num_query_groups_per_partition")


class _Joined(NamedTuple):
    """How one call of a layer takes part in the exchange of heads.

    Attributes:
        packed: ``packed_seq_params`` of the layer.
        qkv: the projection has already exchanged q, k and v: all rows of this rank's heads.
        proj: attention is deferred to the output projection.
    """

    packed: Any
    qkv: bool
    proj: bool


class UlyssesWrappers(LaneUser):
    """The wrappers of attention under Ulysses and of the layer around it, and their transport.

    Args:
        linears: counts calls and logs reasons under the names ``ulysses``, ``qkv`` and ``proj``;
            only projections among its layers take part in the exchange.
        options: of the fused ops; ``main_grad`` follows each layer's
            ``gradient_accumulation_fusion``.

    Attributes:
        transport: lanes of the context-parallel group.
    """

    def __init__(self, linears: LinearWrappers, options: LinearOptions = LinearOptions()) -> None:
        super().__init__("UlyssesWrappers", CONTEXT_PARALLEL, options.schedule.lanes)
        self._linears = linears
        self._options = by_fusion(options)
        self._positions = WholePositions()

    def register(self, manager: Any, attention: str = MINDSPEED_ULYSSES) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in.

        Args:
            attention: dotted path of the class that exchanges heads around ``local_attn``.
        """
        manager.register_patch(f"{attention}.forward", self.ulysses_forward_wrapper)
        # The forward of the base class, because other MindSpeed features wrap that one.
        manager.register_patch(_ATTENTION, self.attention_forward_wrapper)

    @around
    def ulysses_forward_wrapper(
        self, forward: Callable[..., Any], attention: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """``forward(query, key, value, mask, ...)``, from ``[s, B, A, D]`` to ``[s, B, A * D]``.

        Equals, but for rounding::

            q_SBAD, k_SBGD, v_SBGD = all_to_all(q), all_to_all(k), all_to_all(v)   # own heads
            o_SBAD = local_attn(q_SBAD, k_SBGD, v_SBGD)
            o_sBAD = all_to_all(o_SBAD)                                            # own rows
        """
        plain = functools.partial(forward, attention)
        return self._exchange(attention, plain, None, *args, **kwargs)

    @around
    def attention_forward_wrapper(
        self,
        forward: Callable[..., Output],
        layer: Any,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Output:
        """``forward(hidden_states, mask, ...)``, from ``[s, B, H]`` to ``[s, B, H]`` and a bias.

        During the call, projections that can take part in the exchange have another ``forward``,
        and the core attention leaves their part of the exchange to them.
        """
        arguments = forward_arguments(args, kwargs)
        local = getattr(layer.core_attention, "local_attn", None)
        exchanges = getattr(local, "ulysses_comm_para", None) is not None
        if not exchanges or not hasattr(layer, "linear_qkv"):
            return forward(layer, hidden_states, *args, **kwargs)
        call = AttentionCall.of(layer, layer.core_attention.training, (), arguments)
        call = call._replace(config=innermost(local).config)
        # Otherwise the wrapper of the exchange logs the reason.
        if call.obstacle() or self._obstacle(
            layer.core_attention,
            hidden_states.shape[0],
            layer.num_attention_heads_per_partition,
            layer.num_query_groups_per_partition,
            (call.of_data,),
            {},
        ):
            return forward(layer, hidden_states, *args, **kwargs)
        with ExitStack() as stack:
            arguments = self._join(layer, hidden_states, call, stack)
            return forward(layer, hidden_states, **arguments)

    def _join(
        self, layer: Any, hidden: torch.Tensor, call: AttentionCall, stack: ExitStack
    ) -> dict[str, Any]:
        """Let the layer's projections take part, by replaced methods, until ``stack`` closes.

        Returns:
            The keyword arguments for the layer's ``forward``.
        """
        lanes, layers, arguments = self.lanes(), self._linears.layers, call.arguments
        packed, rows = arguments.get("packed_seq_params"), hidden.shape[0]
        obstacle = layer_obstacle(layer, arguments)
        if obstacle is None:
            mask = call.mask(rows * lanes.size, hidden.shape[1])
            obstacle = mask if isinstance(mask, str) else None
        reasons = {
            "qkv": obstacle or qkv_obstacle(layer, rows, lanes.size, arguments, layers),
            "proj": obstacle or proj_obstacle(layer, layers),
        }
        for name, reason in reasons.items():
            if reason is not None:
                self._linears.fall_back(f"{name} of ulysses", reason)
        joined = _Joined(packed, reasons["qkv"] is None, reasons["proj"] is None)
        core = layer.core_attention
        if joined.qkv or joined.proj:
            exchange = functools.partial(self._exchange, core, core.forward, joined)
            stack.enter_context(replaced(core, forward=exchange))
        if joined.proj:
            project = self._projection_of_heads(layer.linear_proj)
            stack.enter_context(replaced(layer.linear_proj, forward=project))
        if not joined.qkv:
            return arguments
        method, product = self._projection_to_heads(layer.linear_qkv)
        stack.enter_context(replaced(layer.linear_qkv, **{method: product}))
        fewer = {name: getattr(layer, name) // lanes.size for name in _HEADS}
        stack.enter_context(replaced(layer, **fewer))
        positions = arguments.get("rotary_pos_emb")
        if packed is None:
            return arguments | {"rotary_pos_emb": self._positions.of(positions, lanes.group)}
        if getattr(layer.config, "reset_position_ids", False):
            positions = picked(positions, self._positions.of(packed.position_ids, lanes.group))
        # Without packed_seq_params Megatron uses the embeddings of all rows as they are.
        return arguments | {"rotary_pos_emb": positions, "packed_seq_params": None}

    def _projection_to_heads(self, linear: Any) -> tuple[str, Callable[..., Any]]:
        """The method to replace, and its replacement: ``[S, B, q, k and v of own heads]``."""
        options = self._options[linear.gradient_accumulation_fusion]

        def product(
            input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any
        ) -> torch.Tensor:
            self._linears.calls["qkv", "fused"] += 1
            bias = trained_bias(bias, weight)
            # A query group is a range of weight rows, and so are the groups of a rank.
            return linear_all_to_all(input, weight, bias, transport=self.lanes(), options=options)

        def column_forward(input_: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
            return product(input_, linear.weight, linear.bias), None

        method = qkv_method(linear)
        assert method is not None
        return method, column_forward if method == "forward" else product

    def _projection_of_heads(self, linear: Any) -> Callable[..., Output]:
        """A forward that runs attention and the row-parallel layer: ``[s, B, H]`` and a bias."""
        plain, options = linear.forward, self._options[linear.gradient_accumulation_fusion]

        def forward(input_: torch.Tensor) -> Output:
            if not isinstance(input_, DeferredAttention):
                return plain(input_)
            self._linears.calls.update({("ulysses", "fused"): 1, ("proj", "fused"): 1})
            return input_.project(attention_all_to_all, linear, options, self.lanes())

        return forward

    def _exchange(
        self,
        attention: Any,
        own: Callable[..., torch.Tensor],
        joined: _Joined | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Core attention, from q, k, v of own rows to the output of own rows.

        Args:
            own: the forward of the class.
            joined: ``None`` if no projection takes part.
            args, kwargs: of the call, starting with the mask.
        """
        if joined is not None and joined.packed is not None:
            kwargs["packed_seq_params"] = joined.packed
        exchanged = joined is not None and joined.qkv
        core, lanes = innermost(attention.local_attn), self.lanes()
        call = AttentionCall.of(core, attention.training, args, kwargs)
        mask: dict[str, Any] | str | None = call.tensor_obstacle(query, key, value)
        if not (mask or exchanged):
            heads = query.shape[2], key.shape[2]
            mask = self._obstacle(attention, query.shape[0], *heads, args, kwargs)
        if mask is None:
            length = query.shape[0] * (1 if exchanged else lanes.size)
            mask = call.mask(length, query.shape[1])
        if isinstance(mask, str):
            if joined is None or exchanged:
                self._linears.fall_back("ulysses", mask)
            if not exchanged:
                return own(query, key, value, *args, **kwargs)
            attended = attention.local_attn(query, key, value, *args, **kwargs)
            return heads_to_rows(attended, lanes.group)
        q, k, v = query, key, value
        if not exchanged:
            q, k, v = rows_to_heads(query, key, value, lanes.group)
        scale = scale_of(core)
        attend = functools.partial(self._attend, (q, k, v), mask, scale)
        if joined is None or not joined.proj:
            return attend()
        return DeferredAttention.of(
            q, k, v, mask=mask, scale=scale, attend=attend, ranks=lanes.size
        )

    def _attend(self, heads: Heads, mask: dict[str, Any], scale: float | None) -> torch.Tensor:
        """Attention on exchanged heads; returns ``[s, B, A * D]``."""
        self._linears.calls["ulysses", "fused"] += 1
        arguments = {**mask, "scale": scale, "options": self._options[False]}
        return attention_all_to_all(*heads, transport=self.lanes(), **arguments)

    def _obstacle(
        self,
        attention: Any,
        rows: int,
        heads: int,
        key_heads: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        """Why this exchange of heads keeps its own forward, or ``None`` if it is fused.

        Args:
            rows: of the sequence on this rank.
            heads: query heads of all ranks of the group together; ``key_heads`` likewise.
            args, kwargs: of the exchange, starting with the mask.
        """
        exchange, lanes = attention.local_attn.ulysses_comm_para, self.lanes()
        calculator = exchange.get("gather_size_calculator")
        if active_turns() is not None:
            return PARTNER
        if exchange["spg"] is not lanes.group:
            return "it exchanges heads over another group than the context-parallel one"
        if (exchange["scatter_idx"], exchange["gather_idx"]) != (2, 0):
            return "it exchanges other dimensions than heads and sequence"
        length = None if calculator is None else calculator.calculate(*args, **kwargs)
        if length not in (None, rows * lanes.size):
            return f"a sequence of {length} is not {lanes.size} times {rows}"
        if heads % lanes.size or heads % key_heads:
            return (
                f"{heads} query heads and {key_heads} key heads cannot be shared out "
                f"evenly among {lanes.size} ranks"
            )
        return None


def innermost(local: Any) -> Any:
    """The core attention that computes; newer versions of MindSpeed-LLM nest one in another."""
    return getattr(local, "core_attention", local)


def scale_of(core: Any) -> float | None:
    """The factor by which local attention multiplies the scores; ``None`` for ``D ** -0.5``."""
    scale = getattr(core, "scale", None)  # MindSpeed's classes combine several options in it
    return scale if scale is not None else getattr(core.config, "softmax_scale", None)


def rows_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> Heads:
    """One ``all_to_all`` of q, k and v, from own rows with all heads to all rows of own heads.

    If the number of key heads is not a multiple of the group size, they are repeated as few times
    as make it one: a rank needs at least one key head, which all its query heads may share.

    Args:
        query: ``[s, B, A, D]``, ``A`` a multiple of the group size.
        key, value: ``[s, B, G, D]``, ``A`` a multiple of ``G``.

    Returns:
        ``[S, B, A / N, D]`` and twice ``[S, B, G' / N, D]`` with ``G'`` from ``G`` to ``A``.
    """
    size, shared = group.size(), query.shape[2] // key.shape[2]
    times = next(t for t in range(1, shared + 1) if not (shared % t or key.shape[2] * t % size))
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=2) for x in (key, value))
    by_rank = [
        x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)  # [N, s, B, heads of a rank, D]
        for x in (query, key, value)
    ]
    exchanged = all_to_all(torch.cat(by_rank, dim=3).flatten(0, 1), group)
    q, k, v = exchanged.split([x.shape[3] for x in by_rank], dim=2)
    return q, k, v


def heads_to_rows(attended: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From ``[S, B, F]`` of own heads to ``[s, B, N * F]``, the heads of rank 0 first."""
    return torch.cat(all_to_all(attended, group).chunk(group.size()), dim=2)
