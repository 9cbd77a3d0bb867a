"""Ulysses context parallelism: attention whose last all-to-all is hidden behind it.

MindSpeed puts the core attention of a layer into ``UlyssesContextAttention``, which brings q, k and
v from rows of the sequence to heads in three all-to-alls, attends, and brings the output back in a
fourth, each by itself.  Here its ``forward`` is wrapped; the classes stay.

What is hidden, and what is not yet:

====================  ====================================================================
forward, q k v        one all-to-all instead of three, in front of attention: exposed
forward, output       block by block, behind the attention of the next block
backward, output      block by block, behind the backward of attention of the block before
backward, dq dk dv    one all-to-all after attention: exposed
====================  ====================================================================

The exposed one could hide behind the projection to q, k and v
(:func:`~commfuse_npu.ops.linear_all_to_all`), and the output's projection could join the pipeline
(:func:`~commfuse_npu.ops.attention_all_to_all_linear`).  Both ops take the whole weight, that is a
tensor-parallel group of one, and between the first and attention there are the rotary embedding and
norms, which Megatron computes for the rows of a rank and not for all of them.  Neither is wired up.

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G``
key heads of all ranks of the group together, ``D`` features of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.ops import attention_all_to_all, plain_attention_all_to_all
from commfuse_npu.ops.collective_functions import all_to_all
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.transport import Transport
from mindspeed_patches.softmax_attention import call_arguments, mask_type, softmax_obstacle
from mindspeed_patches.wrappers import Form, LinearWrappers

__all__ = ["MINDSPEED_ULYSSES", "UlyssesWrappers", "rows_to_heads"]

MINDSPEED_ULYSSES = (
    "mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel"
    ".UlyssesContextAttention"
)

Forward = Callable[..., torch.Tensor]


class UlyssesWrappers:
    """The wrapper of attention under Ulysses, and its transport.

    Args:
        linears: where calls are counted and reasons are logged, under the name ``ulysses``.
        options: of the fused attention; the schedule counts.
        form: ``fused``; or ``plain``, the plain collective with the blocks of the fused form, the
            reference that it equals bit for bit.

    Attributes:
        transport: lanes of the context-parallel group.  Set it when the groups exist and before
            the first forward.
    """

    def __init__(
        self,
        linears: LinearWrappers,
        options: LinearOptions = LinearOptions(),
        form: Form = "fused",
    ) -> None:
        self.transport: Transport | None = None
        self._linears = linears
        self._options = options
        self._form = form

    def register(self, manager: Any, attention: str = MINDSPEED_ULYSSES) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in.

        Args:
            attention: the class that exchanges heads around ``local_attn``.
        """
        manager.register_patch(f"{attention}.forward", self.ulysses_forward_wrapper)

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
            core = _core(attention.local_attn)
            given = call_arguments(args[1:], kwargs)  # the first one is the mask
            mask = mask_type(core, given)
            reason = softmax_obstacle(
                core.config, attention.training, query, key, value, mask, given
            ) or self._obstacle(attention, query, key, args, kwargs)
            if reason is not None:
                self._linears.leave("ulysses", reason)
                return forward(attention, query, key, value, *args, **kwargs)
            self._linears.calls["ulysses", self._form] += 1
            return self._attend(query, key, value, mask == "causal", _scale(core))

        return ulysses_forward

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        lanes = self._lanes()
        heads = rows_to_heads(query, key, value, lanes.group)
        if self._form == "fused":
            return attention_all_to_all(
                *heads, transport=lanes, causal=causal, scale=scale, options=self._options
            )
        return plain_attention_all_to_all(
            *heads,
            group=lanes.group,
            causal=causal,
            scale=scale,
            options=self._options,
            same_blocks=True,
        )

    def _lanes(self) -> Transport:
        if self.transport is None:
            raise RuntimeError(
                "the lanes of the context-parallel group do not exist: set "
                "UlyssesWrappers.transport = Transport.create(get_context_parallel_group()) on all "
                "ranks after initialize_model_parallel and before the first forward"
            )
        return self.transport

    def _obstacle(
        self,
        attention: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        """Why this exchange of heads keeps its own forward, or ``None``."""
        exchange = attention.local_attn.ulysses_comm_para
        lanes = self._lanes()
        if exchange["spg"] is not lanes.group:
            return "it exchanges heads over another group than the context-parallel one"
        if lanes.size == 1:
            return "a context-parallel group of one has nothing to transfer"
        if (exchange["scatter_idx"], exchange["gather_idx"]) != (2, 0):
            return "it exchanges other dimensions than heads and sequence"
        calculator = exchange.get("gather_size_calculator")
        whole = None if calculator is None else calculator.calculate(*args, **kwargs)
        if whole not in (None, query.shape[0] * lanes.size):
            return f"a sequence of {whole} is not {lanes.size} times {query.shape[0]}"
        if query.shape[2] % lanes.size or query.shape[2] % key.shape[2]:
            return (
                f"{query.shape[2]} query heads and {key.shape[2]} key heads cannot be shared out "
                f"evenly among {lanes.size} ranks"
            )
        if getattr(attention.local_attn.config, "context_parallel_kv_cache_policy", None):
            return "context_parallel_kv_cache_policy leaves the exchange to local attention"
        return None


def _core(local: Any) -> Any:
    """The core attention that computes; newer versions of MindSpeed-LLM put one into another."""
    return getattr(local, "core_attention", local)


def _scale(core: Any) -> float | None:
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
