"""Ulysses context parallelism: its all-to-alls hidden behind attention and its projections.

MindSpeed puts the core attention of a layer into ``UlyssesContextAttention``, which brings q, k and
v from rows of the sequence to heads in three all-to-alls, attends, and brings the output back in a
fourth, each by itself.  Here its ``forward`` is wrapped, and that of the layer around it; the
classes stay.  Each projection of a layer joins the exchange if it can:

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

A chain with both, and what is counted of it::

    linear_all_to_all -> norms, rotary embedding -> attention_all_to_all_linear
         qkv                                             ulysses | proj

Norms and rotary embedding are per row and head, so they give the same bits on either side of an
exchange.  Behind it they need the positions of the whole sequence, which are gathered once per
tensor that Megatron computes them into (:mod:`.whole_positions`).  Of packed documents MindSpeed
has the embeddings of the whole sequence on every rank, and picks those of its rows' positions in
each layer; there the positions are gathered, and the picking is done here.

What a layer has to be like is in :mod:`.ulysses_layer`: whole weights (a tensor-parallel group of
one), and for q, k and v as many query groups as can be shared out.  Else the reason is counted
under ``qkv of ulysses`` or ``proj of ulysses``, and the rest is fused without that projection.

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G``
key heads of all ranks of the group together, ``D`` features of a head, ``H`` hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from commfuse_npu.ops import LinearOptions, attention_all_to_all_linear, linear_all_to_all
from commfuse_npu.ops.attention_mask import AttentionMask
from mindspeed_patches.deferred_attention import DeferredAttention
from mindspeed_patches.lanes import Form
from mindspeed_patches.softmax_attention import (
    call_arguments,
    call_obstacle,
    mask_of_call,
    mask_type,
    softmax_obstacle,
)
from mindspeed_patches.ulysses_exchange import (
    UlyssesExchange,
    heads_to_rows,
    innermost,
    rows_to_heads,
    scale_of,
)
from mindspeed_patches.ulysses_layer import (
    forward_arguments,
    layer_obstacle,
    proj_obstacle,
    qkv_method,
    qkv_obstacle,
    replaced,
)
from mindspeed_patches.whole_positions import WholePositions
from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["MINDSPEED_ULYSSES", "UlyssesWrappers"]

MINDSPEED_ULYSSES = (
    "mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel"
    ".UlyssesContextAttention"
)

LayerForward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_ATTENTION = "megatron.core.transformer.attention.Attention.forward"
_HEADS = ("num_attention_heads_per_partition", "num_query_groups_per_partition")


class UlyssesWrappers(UlyssesExchange):
    """The wrappers of attention under Ulysses and of the layer around it, and their transport.

    Args:
        linears: where calls are counted and reasons are logged, under the names ``ulysses``,
            ``qkv`` and ``proj``; only projections among its layers join the exchange.
        options, form: see :class:`UlyssesExchange`.
    """

    def __init__(
        self,
        linears: LinearWrappers,
        options: LinearOptions = LinearOptions(),
        form: Form = "fused",
    ) -> None:
        super().__init__(linears, options, form)
        self._positions = WholePositions()

    def register(self, manager: Any, attention: str = MINDSPEED_ULYSSES) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in.

        Args:
            attention: the class that exchanges heads around ``local_attn``.
        """
        manager.register_patch(f"{attention}.forward", self.ulysses_forward_wrapper)
        # Of the base class: there others of MindSpeed's features register theirs.
        manager.register_patch(_ATTENTION, self.attention_forward_wrapper)

    def attention_forward_wrapper(self, forward: LayerForward) -> LayerForward:
        """``forward(hidden_states, mask, ...)``, from ``[s, B, H]`` to ``[s, B, H]`` and a bias.

        While it lasts, projections that can join the exchange have another ``forward``, and the
        core attention does its part for them.
        """

        @functools.wraps(forward)
        def attention_forward(
            layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            given = forward_arguments(args, kwargs)
            if not self._can_exchange(layer, hidden_states, given):
                return forward(layer, hidden_states, *args, **kwargs)
            with ExitStack() as stack:
                given = self._join(layer, hidden_states, given, stack)
                return forward(layer, hidden_states, **given)

        return attention_forward

    def _can_exchange(self, layer: Any, hidden: torch.Tensor, given: dict[str, Any]) -> bool:
        """Whether core attention is an exchange of heads that is fused; else it says itself why."""
        attention = layer.core_attention
        local = getattr(attention, "local_attn", None)
        if getattr(local, "ulysses_comm_para", None) is None or not hasattr(layer, "linear_qkv"):
            return False
        core = innermost(local)
        obstacle = call_obstacle(
            core.config, attention.training, mask_type(layer, {}), given
        ) or self._obstacle(
            attention,
            hidden.shape[0],
            layer.num_attention_heads_per_partition,
            layer.num_query_groups_per_partition,
            (given.get("attention_mask"),),
            {},
        )
        return obstacle is None

    def _join(
        self, layer: Any, hidden: torch.Tensor, given: dict[str, Any], stack: ExitStack
    ) -> dict[str, Any]:
        """Let projections of the layer join the exchange until ``stack`` ends.

        Returns:
            What ``forward`` is to be given.
        """
        size, layers = self.lanes().size, self._linears.layers
        packed = given.get("packed_seq_params")
        both = layer_obstacle(layer, given)
        if both is None:
            config = innermost(layer.core_attention.local_attn).config
            kind, of_data = mask_type(layer, {}), given.get("attention_mask")
            length, batch = hidden.shape[0] * size, hidden.shape[1]
            mask = mask_of_call(config, kind, given, of_data, length, batch)
            both = mask if isinstance(mask, str) else None
        reasons = {
            "qkv": both or qkv_obstacle(layer, hidden.shape[0], size, given, layers),
            "proj": both or proj_obstacle(layer, layers),
        }
        for name, reason in reasons.items():
            if reason is not None:
                self._linears.leave(f"{name} of ulysses", reason)
        exchanged, joins = reasons["qkv"] is None, reasons["proj"] is None
        if exchanged or joins:
            attend = self._attention_between(layer.core_attention, packed, exchanged, joins)
            stack.enter_context(replaced(layer.core_attention, forward=attend))
        if joins:
            project = self._projection_of_heads(layer.linear_proj)
            stack.enter_context(replaced(layer.linear_proj, forward=project))
        if exchanged:
            method, project_out = self._projection_to_heads(layer.linear_qkv)
            stack.enter_context(replaced(layer.linear_qkv, **{method: project_out}))
            fewer = {name: getattr(layer, name) // size for name in _HEADS}
            stack.enter_context(replaced(layer, **fewer))
            positions = given.get("rotary_pos_emb")
            if packed is None:
                return given | {"rotary_pos_emb": self._whole(positions)}
            if getattr(layer.config, "reset_position_ids", False):
                positions = _picked(
                    positions, self._positions.of(packed.position_ids, self.lanes().group)
                )
            # Without documents Megatron takes embeddings of all rows as they are.
            given = given | {"rotary_pos_emb": positions, "packed_seq_params": None}
        return given

    def _whole(self, positions: Any) -> Any:
        """Of this rank's rows ``[s, ...]``, one or a tuple, to those of all rows ``[S, ...]``."""
        if isinstance(positions, tuple):
            return tuple(self._whole(part) for part in positions)
        return None if positions is None else self._positions.of(positions, self.lanes().group)

    def _projection_to_heads(self, linear: Any) -> tuple[str, Callable[..., Any]]:
        """The method to replace, and what makes ``[S, B, q, k and v of own heads]`` instead."""
        options = self._options[linear.gradient_accumulation_fusion]

        def product(
            input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any
        ) -> torch.Tensor:
            self._linears.calls["qkv", self._form] += 1
            if bias is not None and not weight.requires_grad:
                # As in Megatron: beside a frozen weight the bias gets no gradient either.
                bias = bias.detach()
            # A query group is rows of the weight one after the other, and so are those of a rank.
            return linear_all_to_all(input, weight, bias, transport=self.carrier(), options=options)

        def column_forward(input_: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
            return product(input_, linear.weight, linear.bias), None

        method = qkv_method(linear)
        assert method is not None
        return method, column_forward if method == "forward" else product

    def _attention_between(
        self, attention: Any, packed: Any, exchanged: bool, joins: bool
    ) -> Callable[..., torch.Tensor]:
        """Core attention between two projections.

        Args:
            packed: ``packed_seq_params`` of the layer.
            exchanged: q, k and v have all rows of this rank's heads already.
            joins: the projection of the output waits for attention.
        """
        own = attention.forward
        core = innermost(attention.local_attn)
        lanes = self.lanes()

        def forward(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            if packed is not None:
                kwargs["packed_seq_params"] = packed
            given = call_arguments(args[1:], kwargs)
            kind, scale = mask_type(core, given), scale_of(core)
            mask: AttentionMask | str | None = softmax_obstacle(
                core.config, attention.training, query, key, value, kind, given
            )
            if mask is None:
                of_data = args[0] if args else kwargs.get("attention_mask")
                length = query.shape[0] * (1 if exchanged else lanes.size)
                mask = mask_of_call(core.config, kind, given, of_data, length, query.shape[1])
            if isinstance(mask, str):
                if not exchanged:
                    return own(query, key, value, *args, **kwargs)
                self._linears.leave("ulysses", mask)
                attended = attention.local_attn(query, key, value, *args, **kwargs)
                return heads_to_rows(attended, lanes.group)
            heads = query, key, value
            if not exchanged:
                heads = rows_to_heads(query, key, value, lanes.group)
            if not joins:
                return self._attend(heads, mask, scale)
            return DeferredAttention.of(
                *heads,
                mask=mask,
                scale=scale,
                attend=lambda: self._attend(heads, mask, scale),
                ranks=lanes.size,
            )

        return forward

    def _projection_of_heads(self, linear: Any) -> LayerForward:
        """The row-parallel layer with the attention in front of it, ``[s, B, H]`` and a bias."""
        own = linear.forward

        def forward(input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            if not isinstance(input_, DeferredAttention):
                return own(input_)
            for name in ("ulysses", "proj"):
                self._linears.calls[name, self._form] += 1
            arguments: dict[str, Any] = {
                "bias": None if linear.skip_bias_add else linear.bias,
                **input_.mask._asdict(),
                "scale": input_.scale,
                "options": self._options[linear.gradient_accumulation_fusion],
            }
            tensors = input_.q, input_.k, input_.v, linear.weight
            output = attention_all_to_all_linear(*tensors, **arguments, transport=self.carrier())
            return output, linear.bias if linear.skip_bias_add else None

        return forward


def _picked(embeddings: Any, positions: torch.Tensor) -> Any:
    """``[S, 1, 1, D]``, one or a tuple or none, of positions ``[S, B]``: ``[S, B, 1, D]``."""
    if isinstance(embeddings, tuple):
        return tuple(_picked(part, positions) for part in embeddings)
    if embeddings is None:
        return None
    return embeddings[positions.flatten()].view(*positions.shape, 1, -1)
