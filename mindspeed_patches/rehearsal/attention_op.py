"""CPU kernels for torch_npu's attention, ``npu_fusion_attention``, and its gradient.

The rules of :mod:`.npu_ops` apply here, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from einops import EinopsError, rearrange
from torch.nn.functional import pad

from commfuse_npu.kernels import cpu

__all__ = ["refuse", "register_attention"]


_LAYOUTS = {
    "SBH": "s b (n d)",
    "BSH": "b s (n d)",
    "BSND": "b s n d",
    "BNSD": "b n s d",
    "TND": "(b s) n d",
}
"""``input_layout`` of attention; TND is treated as one batch of all tokens."""
_COMPRESSED = 2048
"""Side of the triangular mask for the sparse modes 2, 3 and 4, whatever the lengths."""
_STATISTICS = 8
"""Number of copies of a row's maximum and sum in the operator's last dimension."""
_FAR = 2147483647
"""The default of ``pre_tockens`` and ``next_tockens``: beyond any key."""
_SHARED = (
    *("query", "key", "value", "head_num", "input_layout", "atten_mask", "pre_tockens"),
    *("next_tockens", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"),
)
"""Arguments that forward and backward of attention share."""
_NO_MATTER = {
    *("inner_precise", "gen_mask_parallel", "sync", "softmax_layout", "softmax_in"),
    *("seed", "offset", "numels"),
}
"""Arguments that do not affect the result, or only dropout, which is refused separately."""
_names: list[str] = []
"""The arguments of attention, in the order of the wheel's schema."""


def register_attention(library: torch.library.Library) -> None:
    """Register the kernels of attention; its gradient calls the device's gradient operator."""
    schema = torch.ops.npu.npu_fusion_attention.default._schema
    _names[:] = [argument.name for argument in schema.arguments]
    library.impl("npu_fusion_attention", _by_name, "CPU")
    # That of 2.7.1 has no gradient of sink, and an additional result would end the process.
    grads = len(torch.ops.npu.npu_fusion_attention_grad.default._schema.returns)
    library.impl(
        "npu_fusion_attention_grad", lambda *a, **k: fusion_attention_grad(*a, **k)[:grads], "CPU"
    )
    torch.library.register_autograd(
        "npu::npu_fusion_attention", _backward, setup_context=_keep, lib=library
    )


def refuse(operator: str, others: Mapping[str, object]) -> None:
    """Raise for an argument that would change the result and is not emulated.

    The dispatcher omits keywords that equal the schema's default; of positional arguments only None
    has to be ignored.
    """
    for name, value in others.items():
        if value is not None and name not in _NO_MATTER:
            text = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(
                f"{operator}: {name} {text} is not emulated on the CPU; leave it out or use an NPU"
            )


@cache
def _triangle() -> torch.Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool).triu(1)


def _hidden(
    mask: torch.Tensor | None, mode: int, before: int, after: int, queries: int, keys: int
) -> torch.Tensor:
    """True where a query must not see a key, ``[queries, keys]``.

    ========================= ===================================================================
    sparse_mode               what a query does not see
    ========================= ===================================================================
    0                         where the mask is True or the distance outside of pre/next_tockens
    1                         where the mask is True
    2 (compressed mask)       later keys, both counted from the first
    3 (compressed mask)       later keys, both counted from the last
    4 (compressed mask)       keys outside of pre/next_tockens, counted from the last
    ========================= ===================================================================

    Without a mask it sees everything in every mode; the device does so without an error.
    """
    if mask is None:
        return torch.zeros(queries, keys, dtype=torch.bool)
    if mode == 1:
        return mask.bool()
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1)
    if mode in (3, 4):
        distance -= keys - queries
    if mode in (2, 3):
        return distance > 0
    outside = (distance > after) | (distance < -before)
    return outside if mode == 4 else outside | mask.bool()


def _check_modes(input_layout: str, sparse_mode: int, mask: torch.Tensor | None) -> None:
    if sparse_mode not in range(5):
        raise NotImplementedError(
            f"npu_fusion_attention: sparse_mode {sparse_mode} is not emulated; 0 to 4 are"
        )
    if input_layout not in _LAYOUTS:
        raise NotImplementedError(
            f"npu_fusion_attention: input_layout {input_layout!r} is not emulated; use "
            f"{', '.join(_LAYOUTS)}"
        )
    if mask is None or sparse_mode < 2:
        return
    triangle = _triangle()
    if mask.shape[-2:] != triangle.shape or mask.numel() != triangle.numel():
        raise ValueError(
            f"npu_fusion_attention: sparse_mode {sparse_mode} takes the compressed mask, "
            f"{tuple(triangle.shape)}, not {tuple(mask.shape)}; use sparse_mode 0 or 1 with it"
        )
    if not torch.equal(mask.view(triangle.shape).bool(), triangle):
        raise ValueError(
            f"npu_fusion_attention: sparse_mode {sparse_mode} takes a mask that is True above the "
            "diagonal, where nothing may be seen; this one differs"
        )


def _spread(x: torch.Tensor, layout: str, **sizes: int) -> torch.Tensor:
    """Rearrange to ``[S, B, A, D]``, the layout of :mod:`commfuse_npu.kernels.cpu`."""
    batch = {"b": 1} if layout == "TND" else {}
    return rearrange(x, f"{_LAYOUTS[layout]} -> s b n d", **sizes, **batch)


def _gather(x: torch.Tensor, layout: str, size: int) -> torch.Tensor:
    """The inverse of :func:`_spread`, with the first ``size`` features of each head."""
    return rearrange(x[..., :size], f"s b n d -> {_LAYOUTS[layout]}").contiguous()


def _attention(
    operator: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor | None = None,
    keep_prob: float = 1.0,
    pre_tockens: int = _FAR,
    next_tockens: int = _FAR,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[list[torch.Tensor], list[int], torch.Tensor | None]:
    """Check the arguments that forward and backward share.

    Returns:
        Query, key and value as ``[S, B, A, D]``, their head sizes, and the mask of hidden keys. The
        values of latent attention have smaller heads; all are padded with zeros to the same D,
        which does not change any other feature.
    """
    refuse(operator, {**others, "keep_prob": None if keep_prob == 1.0 else keep_prob})
    _check_modes(input_layout, sparse_mode, atten_mask)
    try:
        q = _spread(query, input_layout, n=head_num)
        k = _spread(key, input_layout, d=q.shape[-1])
        v = _spread(value, input_layout, n=k.shape[2])
        sizes = [x.shape[-1] for x in (q, k, v)]
        q, k, v = (pad(x, (0, max(sizes) - x.shape[-1])) for x in (q, k, v))
        cpu.check_attention(q, k, v)
    except (EinopsError, ValueError) as error:
        raise ValueError(
            f"npu_fusion_attention: head_num {head_num}, query {tuple(query.shape)}, key "
            f"{tuple(key.shape)} and value {tuple(value.shape)} in {input_layout} do not fit"
        ) from error
    rows = [len(q), len(k)]
    window = atten_mask, sparse_mode, pre_tockens, next_tockens
    if input_layout != "TND":
        hidden = None if atten_mask is None else _hidden(*window, *rows).reshape(-1, 1, *rows)
        return [q, k, v], sizes, hidden
    if actual_seq_qlen is None or actual_seq_kvlen is None:
        raise ValueError(
            "npu_fusion_attention: TND needs actual_seq_qlen and actual_seq_kvlen, the ends of "
            "the packed sequences"
        )
    ends = [[0, *actual_seq_qlen], [0, *actual_seq_kvlen]]
    for bounds, count in zip(ends, rows, strict=True):
        if bounds[-1] != count:
            raise ValueError(
                f"npu_fusion_attention: the packed sequences end at {bounds[-1:]}, the tensor has "
                f"{count} rows; the rows behind would be uninitialized"
            )
    hidden = torch.ones(1, 1, *rows, dtype=torch.bool)
    for of_queries, of_keys in zip(*map(pairwise, ends), strict=True):
        block = hidden[0, 0, slice(*of_queries), slice(*of_keys)]
        block.copy_(_hidden(*window, *block.shape))
    return [q, k, v], sizes, hidden


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale: float = 1.0,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Flash attention.

    Returns:
        The output, like ``query``; maximum and sum of each row's softmax, fp32 ``[B, A, S, 8]``
        (``[T, A, 8]`` for TND); an empty tensor; and three numbers for dropout, zero.
    """
    (q, k, v), sizes, hidden = _attention(
        "npu_fusion_attention", query, key, value, head_num, input_layout, **keywords
    )
    x, rows = cpu.attention_forward(q, k, v, causal=False, scale=scale, hidden=hidden)
    shape = q.shape[1], q.shape[2], len(q), 1
    statistics = [row.view(shape).expand(-1, -1, -1, _STATISTICS) for row in rows]
    if input_layout == "TND":
        statistics = [row.squeeze(0).transpose(0, 1) for row in statistics]
    top, total = (row.contiguous() for row in statistics)
    return _gather(x, input_layout, sizes[2]), top, total, query.new_empty(0), 0, 0, 0


def fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: torch.Tensor | None = None,
    softmax_sum: torch.Tensor | None = None,
    attention_in: torch.Tensor | None = None,
    scale_value: float = 1.0,
    **keywords: Any,
) -> tuple[torch.Tensor, ...]:
    """The backward of :func:`fusion_attention`.

    It uses the statistics as given: ring attention passes those of all blocks together.

    Returns:
        The gradients of query, key and value, and empty tensors for those of pse and sink.
    """
    name = "npu_fusion_attention_grad"
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise ValueError(
            f"{name}: softmax_max, softmax_sum and attention_in are results of the forward; pass "
            "all three"
        )
    (q, k, v), sizes, hidden = _attention(
        name, query, key, value, head_num, input_layout, **keywords
    )
    statistics = [softmax_max[..., :1], softmax_sum[..., :1]]
    if input_layout == "TND":
        statistics = [part.transpose(0, 1) for part in statistics]
    statistics = [part.reshape(q.shape[1], k.shape[2], -1, 1) for part in statistics]
    grad, out = (_spread(x, input_layout, n=head_num) for x in (dy, attention_in))
    grad, out = (pad(x, (0, q.shape[-1] - x.shape[-1])) for x in (grad, out))
    made_k, made_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    made_q = cpu.attention_backward(
        grad, q, k, v, out, statistics, made_k, made_v,
        causal=False, scale=scale_value, hidden=hidden,
    )  # fmt: skip
    gradients = [
        _gather(gradient.to(query.dtype), input_layout, size)
        for gradient, size in zip((made_q, made_k, made_v), sizes, strict=True)
    ]
    return *gradients, query.new_empty(0), query.new_empty(0)


def _by_name(*values: Any, **keywords: Any) -> Any:
    """Attention with positional arguments, which end with the last one that is given."""
    return fusion_attention(**dict(zip(_names, values, strict=False)), **keywords)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, *_ = inputs
    ctx.save_for_backward(query, key, value, *output[:3])
    ctx.mark_non_differentiable(*output[1:4])
    ctx.inputs = inputs[3:]


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient, by the same operator as on a device."""
    query, key, value, out, top, total = ctx.saved_tensors
    keywords = dict(zip(_names, (query, key, value, *ctx.inputs), strict=False))
    grads = torch.ops.npu.npu_fusion_attention_grad(
        dy=grad,
        softmax_max=top,
        softmax_sum=total,
        attention_in=out,
        scale_value=keywords["scale"],
        **{name: keywords[name] for name in _SHARED},
    )
    return *grads[:3], *[None] * len(ctx.inputs)
