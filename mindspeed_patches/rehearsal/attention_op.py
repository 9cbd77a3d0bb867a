"""CPU kernels for torch_npu's attention, ``npu_fusion_attention``, and its gradient.

Dense attention in plain torch; the rules of :mod:`.npu_ops` apply here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange, repeat

_NAME = "npu_fusion_attention"
_LAYOUTS = {
    "SBH": "s b (n d)",
    "BSH": "b s (n d)",
    "BSND": "b s n d",
    "BNSD": "b n s d",
    "TND": "(b s) n d",
}
"""``input_layout`` of attention; TND is treated as one batch of all tokens."""
_COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
"""The mask for the sparse modes 2, 3 and 4, whatever the lengths."""
_FAR = 2147483647
"""The default of ``pre_tockens`` and ``next_tockens``: beyond any key."""
_NO_MATTER = {
    *("inner_precise", "gen_mask_parallel", "sync", "softmax_layout", "softmax_in"),
    *("seed", "offset", "numels"),
}
"""Arguments that do not affect the result, or only dropout, which is refused separately."""


def register_attention(library: torch.library.Library) -> None:
    """Register the kernels of attention; autograd differentiates the forward's torch operations."""
    names = [a.name for a in torch.ops.npu.npu_fusion_attention.default._schema.arguments]
    # That of 2.7.1 has no gradient of sink, and an additional result would end the process.
    grads = len(torch.ops.npu.npu_fusion_attention_grad.default._schema.returns)

    def forward(*values: Any, **keywords: Any) -> tuple[Any, ...]:
        """With positional arguments, which end with the last one that is given."""
        return fusion_attention(**dict(zip(names, values, strict=False)), **keywords)

    def backward(*values: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        return fusion_attention_grad(*values, **keywords)[:grads]

    library.impl(_NAME, forward, "CompositeImplicitAutograd")
    library.impl(f"{_NAME}_grad", backward, "CompositeImplicitAutograd")


def _hidden(
    mask: torch.Tensor | None, mode: int, before: int, after: int, queries: int, keys: int
) -> torch.Tensor:
    """True where a query must not see a key, ``[queries, keys]``.

    Distances are counted from the first query and the first key, in modes 3 and 4 from the last.
    Without a mask a query sees everything in every mode; the device does so without an error.
    """
    if mask is None:
        return torch.zeros(queries, keys, dtype=torch.bool)
    if mode == 1:
        return mask.bool()
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1)
    if mode in (3, 4):
        distance -= keys - queries
    if mode in (2, 3):  # causal
        return distance > 0
    outside = (distance > after) | (distance < -before)
    return outside if mode == 4 else outside | mask.bool()


def _scores_and_values(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    scale: float,
    *,
    atten_mask: torch.Tensor | None = None,
    keep_prob: float = 1.0,
    pre_tockens: int = _FAR,
    next_tockens: int = _FAR,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores ``[B, A, Sq, Sk]``, ``-inf`` where a key is hidden, and the values, both fp32."""
    # The dispatcher omits keywords that equal the schema's default; positional ones may be None.
    for name, given in {**others, "keep_prob": None if keep_prob == 1.0 else keep_prob}.items():
        if given is not None and name not in _NO_MATTER:
            text = "a tensor" if isinstance(given, torch.Tensor) else repr(given)
            raise NotImplementedError(
                f"{_NAME}: {name} {text} is not emulated on the CPU; leave it out or use an NPU"
            )
    if sparse_mode not in range(5) or input_layout not in _LAYOUTS:
        raise NotImplementedError(
            f"{_NAME}: sparse_mode {sparse_mode} in input_layout {input_layout!r} is not emulated; "
            f"use 0 to 4 in {', '.join(_LAYOUTS)}"
        )
    if atten_mask is not None and sparse_mode >= 2:
        mask = atten_mask.view(atten_mask.shape[-2:]).bool()
        if not torch.equal(mask, _COMPRESSED):
            raise ValueError(
                f"{_NAME}: sparse_mode {sparse_mode} takes the compressed mask, "
                f"{tuple(_COMPRESSED.shape)} and True above the diagonal, where nothing may be "
                f"seen; {tuple(mask.shape)} differs from it; use sparse_mode 0 or 1"
            )
    q = _spread(query, input_layout, n=head_num)
    k = _spread(key, input_layout, d=q.shape[-1])
    v = _spread(value, input_layout, n=k.shape[1])
    k, v = (x.repeat_interleave(head_num // x.shape[1], 1) for x in (k, v))
    rows = q.shape[2], k.shape[2]
    window = atten_mask, sparse_mode, pre_tockens, next_tockens
    if input_layout == "TND":
        ends = [[0, *(given or ())] for given in (actual_seq_qlen, actual_seq_kvlen)]
        last = ends[0][-1], ends[1][-1]
        if last != rows:
            raise ValueError(
                f"{_NAME}: the packed sequences end at {last}, the tensors have {rows} rows; TND "
                "needs actual_seq_qlen and actual_seq_kvlen, the ends of all sequences"
            )
        hidden = torch.ones(rows, dtype=torch.bool)
        for of_queries, of_keys in zip(*map(pairwise, ends), strict=True):
            block = hidden[slice(*of_queries), slice(*of_keys)]
            block.copy_(_hidden(*window, *block.shape))
    else:
        hidden = _hidden(*window, *rows)
    return (q @ k.mT * scale).masked_fill(hidden, -torch.inf), v


def _spread(x: torch.Tensor, layout: str, **sizes: int) -> torch.Tensor:
    """Rearrange to fp32 ``[B, A, S, D]``."""
    batch = {"b": 1} if layout == "TND" else {}
    return rearrange(x.float(), f"{_LAYOUTS[layout]} -> b n s d", **sizes, **batch)


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale: float = 1.0,
    **keywords: Any,
) -> tuple[Any, ...]:
    """Flash attention; zero for a query that sees no key.

    Returns:
        The output, like ``query``; maximum and sum of each row's softmax, fp32 ``[B, A, S, 8]``
        (``[T, A, 8]`` for TND); an empty tensor; and three numbers for dropout, zero.
    """
    scores, v = _scores_and_values(query, key, value, head_num, input_layout, scale, **keywords)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0, 1)
    out = rearrange(weights / total @ v, f"b n s d -> {_LAYOUTS[input_layout]}")
    copies = "1 n t 1 -> t n 8" if input_layout == "TND" else "b n s 1 -> b n s 8"
    statistics = (repeat(row, copies).contiguous() for row in (top, total.detach()))
    return out.to(query.dtype).contiguous(), *statistics, query.new_empty(0), 0, 0, 0


def fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    attention_in: torch.Tensor,
    scale_value: float = 1.0,
    **keywords: Any,
) -> tuple[torch.Tensor, ...]:
    """The backward of :func:`fusion_attention`, from its output and statistics as given.

    Ring attention passes those of all blocks together, with the keys of one block.

    Returns:
        The gradients of query, key and value, and empty tensors for those of pse and sink.
    """
    top, total = (
        x[..., :1].transpose(0, 1) if input_layout == "TND" else x[..., :1]
        for x in (softmax_max, softmax_sum)
    )
    grad, out = (_spread(x, input_layout, n=head_num) for x in (dy, attention_in))
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        scores, values = _scores_and_values(
            q, k, v, head_num, input_layout, scale_value, **keywords
        )
        weights = (scores - top).exp() / total
        # The softmax's backward subtracts the row sum of weight times gradient.
        common = (grad * out).sum(-1, keepdim=True)
        changes = grad, -common.expand_as(weights)
        grads = torch.autograd.grad((weights @ values, weights), (q, k, v), changes)
    return *grads, query.new_empty(0), query.new_empty(0)
