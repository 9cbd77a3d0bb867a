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

from commfuse_npu.launch.refusals import unlisted
from commfuse_npu.ops import LinearOptions, attention_all_to_all, linear_all_to_all
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.runtime.collectives import all_to_all
from mindspeed_patches.job_lanes import CONTEXT_PARALLEL, LaneUser
from mindspeed_patches.patching import around, replaced
from mindspeed_patches.self_attention import (
    Arguments,
    DeferredAttention,
    attention_arguments,
    heads_obstacle,
    proj_obstacle,
)
from mindspeed_patches.ulysses_layer import (
    WholePositions,
    picked,
    projections_obstacle,
    qkv_method,
    qkv_obstacle,
)
from mindspeed_patches.wrappers import PARTNER, LinearWrappers, Output, by_fusion, trained_bias

MINDSPEED_ULYSSES = (
    "mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel"
    ".UlyssesContextAttention"
)

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v: ``[S, B, heads of this rank, D]``."""

_ATTENTION = "megatron.core.transformer.attention.Attention.forward"
_ROW = "megatron.core.tensor_parallel.layers.RowParallelLinear.forward"
_HEADS = ("num_attention_heads_per_partition", "num_query_groups_per_partition")


class _JoinedLayer(NamedTuple):
    """How a call of a layer takes part in the exchange of heads; on its core attention meanwhile.

    Attributes:
        qkv: the projection has already exchanged q, k and v: all rows of this rank's heads.
        proj: attention is deferred to the output projection.
        arguments: of the op with attention.
    """

    qkv: bool
    proj: bool
    arguments: Arguments


class UlyssesWrappers(LaneUser):
    """The wrappers of attention under Ulysses and of the layer around it.

    Args:
        linears: counts calls and logs reasons under the names ``ulysses``, ``qkv`` and ``proj``;
            only projections among its layers take part in the exchange.
        options: of the fused ops; ``main_grad`` follows each layer's
            ``gradient_accumulation_fusion``.
    """

    def __init__(self, linears: LinearWrappers, options: LinearOptions = LinearOptions()) -> None:
        super().__init__("UlyssesWrappers", CONTEXT_PARALLEL, options.schedule)
        self._linears = linears
        self._options = by_fusion(options)
        self._positions = WholePositions()

    def register(self, manager: Any, attention: str = MINDSPEED_ULYSSES) -> None:
        """Register wrappers; ``attention`` is the class that exchanges heads."""
        manager.register_patch(f"{attention}.forward", self.ulysses_forward_wrapper)
        # The forward of the base class, because other MindSpeed features wrap that one.
        manager.register_patch(_ATTENTION, self.attention_forward_wrapper)
        manager.register_patch(_ROW, self.row_forward_wrapper)

    @around
    def ulysses_forward_wrapper(
        self,
        forward: Callable[..., torch.Tensor],
        attention: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``forward(query, key, value, mask, ...)``, from ``[s, B, A, D]`` to ``[s, B, A * D]``.

        Equals, but for rounding::

            q_SBAD, k_SBGD, v_SBGD = all_to_all(q), all_to_all(k), all_to_all(v)   # own heads
            o_SBAD = local_attn(q_SBAD, k_SBGD, v_SBGD)
            o_sBAD = all_to_all(o_SBAD)                                            # own rows
        """
        core = innermost(attention.local_attn)
        lanes = self.lanes()
        joined: _JoinedLayer | None = getattr(attention, "commfuse_joined", None)
        if joined is not None and joined.qkv:
            heads = query, key, value
            arguments = joined.arguments
        else:
            reason = self._obstacle(attention) or heads_obstacle(query, key, value)
            length = query.shape[0] * lanes.size
            batch = query.shape[1]
            found = reason or attention_arguments(core, args, kwargs, length, batch)
            if isinstance(found, str):
                self._linears.fall_back("ulysses", found)
                return forward(attention, query, key, value, *args, **kwargs)
            heads = rows_to_heads(query, key, value, lanes.group)
            arguments = found
        attend = functools.partial(self._attend, heads, arguments)
        if joined is None or not joined.proj:
            return attend()
        return DeferredAttention.of(*heads, arguments=arguments, attend=attend, ranks=lanes.size)

    @around
    def attention_forward_wrapper(
        self,
        forward: Callable[..., Output],
        layer: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> Output:
        """``forward(hidden_states, mask, ...)``, from ``[s, B, H]`` to ``[s, B, H]`` and a bias.

        Projections that can take part in the exchange do so, and the core attention leaves their
        part of it to them.
        """
        core = layer.core_attention
        rows, batch = hidden_states.shape[:2]
        local = getattr(core, "local_attn", None)
        exchanges = getattr(local, "ulysses_comm_para", None) and hasattr(layer, "linear_qkv")
        with ExitStack() as stack:
            if exchanges and self._obstacle(core) is None:
                arguments |= self._join(layer, rows, batch, arguments, stack)
            return forward(layer, hidden_states, attention_mask, **arguments)

    def _join(
        self, layer: Any, rows: int, batch: int, arguments: Arguments, stack: ExitStack
    ) -> Arguments:
        """Let the projections take part until ``stack`` closes; returns arguments that change."""
        lanes = self.lanes()
        obstacle = projections_obstacle(layer, arguments)
        found: Arguments | str = {}
        if obstacle is None:
            core = innermost(layer.core_attention.local_attn)
            passed = {name: arguments.get(name) for name in ("attention_bias", "packed_seq_params")}
            found = attention_arguments(core, (), passed, rows * lanes.size, batch)
        if isinstance(found, str):  # the wrapper of the exchange logs it
            return {}
        reasons = {
            "qkv": obstacle or qkv_obstacle(layer, rows, lanes.size, arguments),
            "proj": obstacle or proj_obstacle(layer.linear_proj),
        }
        for name, reason in reasons.items():
            if name not in self._linears.layers:
                reasons[name] = reason = unlisted(name)
            if reason is not None:
                self._linears.fall_back(f"{name} of ulysses", reason)
        joined = _JoinedLayer(reasons["qkv"] is None, reasons["proj"] is None, found)
        stack.enter_context(replaced(layer.core_attention, commfuse_joined=joined))
        if not joined.qkv:
            return {}
        linear = layer.linear_qkv
        product = functools.partial(self._project_to_heads, linear)
        methods = {
            "forward": lambda x, *_: (product(x, linear.weight, linear.bias), None),
            "_linear_forward_impl": product,
        }
        name = str(qkv_method(linear))
        stack.enter_context(replaced(linear, **{name: methods[name]}))
        fewer = {name: getattr(layer, name) // lanes.size for name in _HEADS}
        stack.enter_context(replaced(layer, **fewer))
        positions = arguments.get("rotary_pos_emb")
        packed = arguments.get("packed_seq_params")
        if packed is None:
            return {"rotary_pos_emb": self._positions.of(positions, lanes.group)}
        if getattr(layer.config, "reset_position_ids", False):
            positions = picked(positions, self._positions.of(packed.position_ids, lanes.group))
        # Without packed_seq_params Megatron uses the embeddings of all rows as they are.
        return {"rotary_pos_emb": positions, "packed_seq_params": None}

    def _project_to_heads(
        self,
        linear: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """The column-parallel layer's product: ``[S, B, q, k and v of own heads]``."""
        self._linears.calls["qkv", "fused"] += 1
        options = self._options[linear.gradient_accumulation_fusion]
        bias = trained_bias(bias, weight)
        # A query group is a range of weight rows, and so are the groups of a rank.
        return linear_all_to_all(input, weight, bias, group=self.lanes(), options=options)

    @around
    def row_forward_wrapper(
        self, forward: Callable[..., Output], layer: Any, input_: torch.Tensor
    ) -> Output:
        """A row-parallel layer's forward, which runs deferred attention, too."""
        if not isinstance(input_, DeferredAttention):
            return forward(layer, input_)
        self._linears.calls.update({("ulysses", "fused"): 1, ("proj", "fused"): 1})
        options = self._options[layer.gradient_accumulation_fusion]
        return input_.project(attention_all_to_all, layer, options, self.lanes())

    def _attend(self, heads: Heads, arguments: Arguments) -> torch.Tensor:
        """Attention on exchanged heads; returns ``[s, B, A * D]``."""
        self._linears.calls["ulysses", "fused"] += 1
        given = arguments | {"options": self._options[False], "group": self.lanes()}
        return attention_all_to_all(*heads, **given)

    def _obstacle(self, attention: Any) -> str | None:
        """Why this exchange of heads keeps its own forward, whatever its mask is."""
        turns = active_turns()
        if turns is not None and not turns.alone:
            return PARTNER
        exchange = attention.local_attn.ulysses_comm_para
        if exchange["spg"] is not self.lanes().group:
            return "it exchanges heads over another group than the context-parallel one"
        # MindSpeed and MindSpeed-LLM never pass these; a program on top of MindSpeed may.
        if (exchange.get("scatter_idx", 2), exchange.get("gather_idx", 0)) != (2, 0):
            return "it exchanges other dimensions than heads and sequence"
        calculator = type(exchange.get("gather_size_calculator")).__name__
        if calculator not in ("NoneType", "DefaultGatherSizeCalculator"):
            return f"{calculator} may gather another number of rows than all ranks have"
        return None


def innermost(local: Any) -> Any:
    """The core attention that computes; newer versions of MindSpeed-LLM nest one in another."""
    return getattr(local, "core_attention", local)


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
    size = group.size()
    shared = query.shape[2] // key.shape[2]
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
