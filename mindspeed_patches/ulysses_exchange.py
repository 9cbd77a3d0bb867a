"""The exchange of heads for rows under Ulysses, around attention: its output sent as it is made.

What :mod:`.ulysses` does when no projection joins the exchange, and the parts that it shares.

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G``
key heads of all ranks of the group together, ``D`` features of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.ops import LinearOptions, attention_all_to_all
from commfuse_npu.ops.attention_mask import AttentionMask
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.runtime.collectives import all_to_all
from mindspeed_patches.lanes import Form, OverLanes
from mindspeed_patches.softmax_attention import (
    call_arguments,
    mask_of_call,
    mask_type,
    softmax_obstacle,
)
from mindspeed_patches.wrappers import PARTNER, LinearWrappers

__all__ = ["UlyssesExchange", "heads_to_rows", "innermost", "rows_to_heads", "scale_of"]

Forward = Callable[..., torch.Tensor]


class UlyssesExchange(OverLanes):
    """The wrapper of the class that exchanges heads; its lanes are of the context-parallel group.

    Args:
        linears: where calls are counted and reasons are logged, under the name ``ulysses``.
        options: of the fused ops; ``main_grad`` follows each layer's
            ``gradient_accumulation_fusion``.
        form: see :data:`~mindspeed_patches.lanes.Form`.
    """

    _missing = (
        "of the context-parallel group do not exist: set UlyssesWrappers.transport = "
        "Transport.create(get_context_parallel_group()) on all ranks after "
        "initialize_model_parallel and before the first forward"
    )

    def __init__(
        self,
        linears: LinearWrappers,
        options: LinearOptions = LinearOptions(),
        form: Form = "fused",
    ) -> None:
        self._linears = linears
        self._options = {fusion: replace(options, main_grad=fusion) for fusion in (False, True)}
        self._form = form

    def ulysses_forward_wrapper(self, forward: Forward) -> Forward:
        """``forward(query, key, value, mask, ...)``, from ``[s, B, A, D]`` to ``[s, B, A * D]``.

        Equals, but for rounding::

            q_SBAD, k_SBGD, v_SBGD = all_to_all(q), all_to_all(k), all_to_all(v)   # own heads
            o_SBAD = local_attn(q_SBAD, k_SBGD, v_SBGD)
            o_sBAD = all_to_all(o_SBAD)                                            # own rows
        """

        @functools.wraps(forward)
        def ulysses_forward(
            attention: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            core = innermost(attention.local_attn)
            given = call_arguments(args[1:], kwargs)  # the first one is the mask
            kind = mask_type(core, given)
            seen: AttentionMask | str | None = softmax_obstacle(
                core.config, attention.training, query, key, value, kind, given
            ) or self._obstacle(
                attention, query.shape[0], query.shape[2], key.shape[2], args, kwargs
            )
            if seen is None:
                length, batch = query.shape[0] * self.lanes().size, query.shape[1]
                of_data = args[0] if args else kwargs.get("attention_mask")
                seen = mask_of_call(core.config, kind, given, of_data, length, batch)
            if isinstance(seen, str):
                self._linears.leave("ulysses", seen)
                return forward(attention, query, key, value, *args, **kwargs)
            heads = rows_to_heads(query, key, value, self.lanes().group)
            return self._attend(heads, seen, scale_of(core))

        return ulysses_forward

    def _attend(
        self,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: AttentionMask,
        scale: float | None,
    ) -> torch.Tensor:
        """From q, k, v ``[S, B, heads of this rank, D]`` to ``[s, B, A * D]``."""
        options = self._options[False]
        self._linears.calls["ulysses", self._form] += 1
        return attention_all_to_all(
            *heads, **mask._asdict(), transport=self.carrier(), scale=scale, options=options
        )

    def _obstacle(
        self,
        attention: Any,
        rows: int,
        heads: int,
        key_heads: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        """Why this exchange of heads keeps its own forward, or ``None``.

        Args:
            rows: of the sequence on this rank.
            heads: for queries, of all ranks of the group together, as are ``key_heads``.
            args, kwargs: of the exchange, from the mask on.
        """
        exchange = attention.local_attn.ulysses_comm_para
        lanes = self.lanes()
        if active_turns() is not None:
            return PARTNER
        if exchange["spg"] is not lanes.group:
            return "it exchanges heads over another group than the context-parallel one"
        if (exchange["scatter_idx"], exchange["gather_idx"]) != (2, 0):
            return "it exchanges other dimensions than heads and sequence"
        calculator = exchange.get("gather_size_calculator")
        whole = None if calculator is None else calculator.calculate(*args, **kwargs)
        if whole not in (None, rows * lanes.size):
            return f"a sequence of {whole} is not {lanes.size} times {rows}"
        if heads % lanes.size or heads % key_heads:
            return (
                f"{heads} query heads and {key_heads} key heads cannot be shared out "
                f"evenly among {lanes.size} ranks"
            )
        return None


def innermost(local: Any) -> Any:
    """The core attention that computes; newer versions of MindSpeed-LLM put one into another."""
    return getattr(local, "core_attention", local)


def scale_of(core: Any) -> float | None:
    """What local attention multiplies the scores by; ``None`` for ``D ** -0.5``."""
    own = getattr(core, "scale", None)  # MindSpeed's classes; they take more than one option in
    return own if own is not None else getattr(core.config, "softmax_scale", None)


def rows_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``all_to_all`` of q, k and v in one, from own rows with all heads to all rows of own heads.

    Key heads that are not as many as several per rank are repeated until they are, no more often
    than that: a rank needs one key head for all of its query heads, if they share it.

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
    whole = all_to_all(torch.cat(by_rank, dim=3).flatten(0, 1), group)
    q, k, v = whole.split([x.shape[3] for x in by_rank], dim=2)
    return q, k, v


def heads_to_rows(attended: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[S, B, F]`` of own heads to ``[s, B, N * F]``, the heads of rank 0 first."""
    return torch.cat(all_to_all(attended, group).chunk(group.size()), dim=2)
