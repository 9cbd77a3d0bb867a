"""CPU kernels for the operators of torch_npu that a dense Llama needs, in plain torch.

:func:`register_cpu_kernels` adds them to the real torch_npu: names, schemas, defaults and meta
kernels stay the wheel's, only what a CPU tensor does is new.  They are written from what the
operators' documentation says and from how MindSpeed calls them; they were never compared with an
NPU.  Everything is computed in fp32 and rounded once to the dtype of the input; an NPU kernel
rounds elsewhere.  What is not emulated raises NotImplementedError, never returns something else.

====================================== ============================================================
operator                               gradients on the CPU
====================================== ============================================================
npu_rms_norm, npu_swiglu,              through the torch operations that it is made of
npu_rotary_mul
npu_fusion_attention                   by npu_fusion_attention_grad from the saved statistics, as on
                                       the device
npu_fusion_attention_grad,             none
npu_apply_adam_w.out,
npu_all_gather_base_mm,
npu_mm_reduce_scatter_base,
those of :mod:`.expert_ops`
====================================== ============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mindspeed_patches.rehearsal.expert_ops import EXPERT_KERNELS

__all__ = ["register_cpu_kernels"]

_COMPRESSED = 2048
"""Side of the triangular mask that the sparse modes 2, 3 and 4 take, whatever the lengths."""
_STATISTICS = 8
"""How often the operator repeats a row's maximum and sum, in a last dimension."""
_FAR = 2147483647
"""The default of ``pre_tockens`` and ``next_tockens``: farther than any key."""

_library: list[torch.library.Library] = []


def register_cpu_kernels() -> None:
    """Give the ``npu::`` operators of this module's table CPU kernels; later calls do nothing.

    Raises:
        RuntimeError: torch_npu, which defines the operators, has not been imported.
    """
    if _library:
        return
    if not hasattr(torch.ops.npu, "npu_fusion_attention"):
        raise RuntimeError(
            "the npu:: operators are not defined; import torch_npu before register_cpu_kernels()"
        )
    # Kept for good: kernels end with the object that registered them.
    library = torch.library.Library("npu", "IMPL")
    _library.append(library)
    for name, kernel in _COMPOSED.items():
        library.impl(name, kernel, "CompositeImplicitAutograd")
    experts = {name: k for name, k in EXPERT_KERNELS.items() if hasattr(torch.ops.npu, name)}
    for name, kernel in {**_KERNELS, **experts}.items():
        library.impl(name, kernel, "CPU")
    # That of 2.7.1 has no gradient of sink, and a result too many ends the process there.
    grads = len(torch.ops.npu.npu_fusion_attention_grad.default._schema.returns)

    def attention_grad(*args: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        return fusion_attention_grad(*args, **keywords)[:grads]

    library.impl("npu_fusion_attention_grad", attention_grad, "CPU")
    # Its arguments come by position up to the last one that is given.
    schema = torch.ops.npu.npu_fusion_attention.default._schema
    names = [argument.name for argument in schema.arguments]
    for kernel, key in ((fusion_attention, "CPU"), (_differentiable_attention, "AutogradCPU")):

        def by_name(*args: Any, kernel: Callable[..., Any] = kernel, **keywords: Any) -> Any:
            return kernel(**dict(zip(names, args, strict=False)), **keywords)

        library.impl("npu_fusion_attention", by_name, key)


_NO_MATTER = (
    *("inner_precise", "gen_mask_parallel", "sync", "softmax_layout", "softmax_in"),
    *("seed", "offset", "numels", "comm_turn", "comm_mode"),
)
"""How a device computes, not what; or of dropout, which is refused itself."""


def _refuse(operator: str, others: Mapping[str, object]) -> None:
    """Raise for an argument that would change the result and is not emulated."""
    for name, value in others.items():
        if value is not None and name not in _NO_MATTER:
            raise NotImplementedError(
                f"{operator}: {name} is not emulated on the CPU; leave it out or use an NPU"
            )


# ------------------------------------------------- normalisation, activation, rotation


def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input / rms(input) * gamma`` over the dimensions of ``gamma``, the last of ``input``.

    Returns:
        The result, of the dtype of ``input``, and ``1 / rms`` in fp32, ``[..., 1]``.
    """
    x = input.float()
    over = tuple(range(-gamma.dim(), 0))
    inverse = torch.rsqrt(x.square().mean(over, keepdim=True) + epsilon)
    return (x * inverse * gamma.float()).to(input.dtype), inverse


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(first half) * second half`` along ``dim``."""
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotary embedding: ``input * r1 + turned(input) * r2``; r1 and r2 are cosines and sines.

    Args:
        rotary_mode: ``half`` pairs feature i with ``i + D/2``, ``interleave`` 2i with ``2i + 1``.
    """
    _refuse("npu_rotary_mul", {"rotate": rotate})
    x = input.float()
    if rotary_mode == "half":
        low, high = x.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
    elif rotary_mode == "interleave":
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        raise NotImplementedError(
            f"npu_rotary_mul: rotary_mode {rotary_mode!r} is not emulated; use half or interleave"
        )
    return (x * r1.float() + turned * r2.float()).to(input.dtype)


# ----------------------------------------------------------------------- attention


@dataclass(frozen=True)
class _Layout:
    """Between a layout of the operator and ``[B, A, S, D]``; TND is one batch of all tokens."""

    name: str

    def spread(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """``[B, A, S, D]`` in fp32 of a tensor whose heads have ``size`` features."""
        x = x.float()
        if self.name in ("SBH", "BSH"):
            x = x.unflatten(-1, (-1, size))
        return x.unsqueeze(0).transpose(1, 2) if self.name == "TND" else x.permute(self._to())

    def gather(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The inverse of :meth:`spread`."""
        x = x.to(dtype)
        if self.name == "TND":
            return x.transpose(1, 2).squeeze(0).contiguous()
        axes = self._to()
        x = x.permute([axes.index(axis) for axis in range(4)])
        return (x.flatten(-2) if self.name in ("SBH", "BSH") else x).contiguous()

    def _to(self) -> tuple[int, int, int, int]:
        orders = {
            "SBH": (1, 2, 0, 3),
            "BSH": (0, 2, 1, 3),
            "BSND": (0, 2, 1, 3),
            "BNSD": (0, 1, 2, 3),
        }
        if self.name not in orders:
            raise NotImplementedError(
                f"npu_fusion_attention: input_layout {self.name!r} is not emulated; use "
                f"{', '.join(orders)} or TND"
            )
        return orders[self.name]


@cache
def _compressed_mask() -> torch.Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool).triu(1)


@dataclass(frozen=True)
class _Masking:
    """Which keys a query may see."""

    sparse_mode: int
    mask: torch.Tensor | None
    before: int
    after: int

    def __post_init__(self) -> None:
        if self.sparse_mode not in range(5):
            raise NotImplementedError(
                f"npu_fusion_attention: sparse_mode {self.sparse_mode} is not emulated; 0 to 4 are"
            )
        if self.mask is None or self.sparse_mode < 2:
            return
        triangle = _compressed_mask()
        if self.mask.shape[-2:] != triangle.shape or self.mask.numel() != triangle.numel():
            raise ValueError(
                f"npu_fusion_attention: sparse_mode {self.sparse_mode} takes the compressed mask, "
                f"{tuple(triangle.shape)}, not {tuple(self.mask.shape)}; use sparse_mode 0 or 1 "
                "with it"
            )
        if not torch.equal(self.mask.view(triangle.shape).bool(), triangle):
            raise ValueError(
                f"npu_fusion_attention: sparse_mode {self.sparse_mode} takes a mask that is True "
                "above the diagonal, where nothing may be seen; this one differs"
            )

    def hidden(self, queries: int, keys: int) -> torch.Tensor | None:
        """True where a query may not see a key, broadcastable to ``[B, A, Sq, Sk]``."""
        if self.mask is None:
            # Of every mode: without a mask attention is full, and the device says nothing.
            return None
        if self.sparse_mode == 1:
            return self.mask.bool()
        distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1)
        if self.sparse_mode == 0:
            return self.mask.bool() | (distance > self.after) | (distance < -self.before)
        if self.sparse_mode == 2:
            return distance > 0
        distance = distance - (keys - queries)
        if self.sparse_mode == 3:
            return distance > 0
        return (distance > self.after) | (distance < -self.before)


@dataclass(frozen=True)
class _Attention:
    """One call, forward or backward: its arguments checked and in ``[B, A, S, D]``."""

    layout: _Layout
    masking: _Masking
    scale: float
    pse: torch.Tensor | None
    segments: list[tuple[slice, slice]]
    """Queries and the keys they belong to; one for all but packed sequences."""

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, segment: tuple[slice, slice]
    ) -> torch.Tensor:
        """Scaled products of a segment, ``-inf`` where nothing may be seen."""
        scores = q[:, :, segment[0]] @ self._heads(k, q)[:, :, segment[1]].mT * self.scale
        if self.pse is not None:
            scores = scores + self.pse.float()
        hidden = self.masking.hidden(scores.shape[-2], scores.shape[-1])
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    @staticmethod
    def _heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Grouped-query attention: a key's head once for every query head of its group."""
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and each row's maximum and sum of exponentials, ``[B, A, Sq, 1]``."""
        outs, tops, totals = [], [], []
        for segment in self.segments:
            scores = self.scores(q, k, segment)
            # A query that sees nothing: maximum and sum of nothing, and an output of zeros.
            top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            divisor = torch.where(total == 0, 1.0, total)
            outs.append(weights / divisor @ self._heads(v, q)[:, :, segment[1]])
            tops.append(top)
            totals.append(total)
        return torch.cat(outs, 2), torch.cat(tops, 2), torch.cat(totals, 2)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        grad: torch.Tensor,
        statistics: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v from the statistics of the forward."""
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dots = (grad * out).sum(-1, keepdim=True)
        for segment in self.segments:
            rows, columns = segment
            top, total = (value[:, :, rows] for value in statistics)
            weights = torch.exp(self.scores(q, k, segment) - top) / torch.where(
                total == 0, 1.0, total
            )
            weighted = grad[:, :, rows] @ self._heads(v, q)[:, :, columns].mT
            change = weights * (weighted - dots[:, :, rows]) * self.scale
            grad_q[:, :, rows] = change @ self._heads(k, q)[:, :, columns]
            grad_k[:, :, columns] = self._groups(change.mT @ q[:, :, rows], k)
            grad_v[:, :, columns] = self._groups(weights.mT @ grad[:, :, rows], v)
        return grad_q, grad_k, grad_v

    @staticmethod
    def _groups(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_heads` for gradients: the sum over the heads of a group."""
        return x.unflatten(1, (k.shape[1], -1)).sum(2)


def _attention_call(
    operator: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    scale: float,
    *,
    pse: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    keep_prob: float = 1.0,
    pre_tockens: int = _FAR,
    next_tockens: int = _FAR,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[_Attention, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments that forward and backward share, checked; and q, k, v in ``[B, A, S, D]``."""
    if keep_prob != 1.0:
        raise NotImplementedError(
            f"{operator}: keep_prob {keep_prob}, dropout is not emulated; use 1.0"
        )
    _refuse(operator, others)
    masking = _Masking(sparse_mode, atten_mask, pre_tockens, next_tockens)
    layout = _Layout(input_layout)
    flat = input_layout in ("SBH", "BSH")
    size = query.shape[-1] // head_num if flat else query.shape[-1]
    q, k = layout.spread(query, size), layout.spread(key, size)
    v = layout.spread(value, value.shape[-1] // k.shape[1] if flat else value.shape[-1])
    fit = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]
    if not fit or q.shape[1] != head_num or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"npu_fusion_attention: head_num {head_num}, query {tuple(query.shape)}, key "
            f"{tuple(key.shape)} and value {tuple(value.shape)} in {input_layout} do not fit"
        )
    segments = [(slice(0, q.shape[2]), slice(0, k.shape[2]))]
    if input_layout == "TND":
        if actual_seq_qlen is None or actual_seq_kvlen is None:
            raise ValueError(
                "npu_fusion_attention: TND needs actual_seq_qlen and actual_seq_kvlen, the ends of "
                "the packed sequences"
            )
        for ends, rows in ((actual_seq_qlen, q.shape[2]), (actual_seq_kvlen, k.shape[2])):
            if not ends or ends[-1] != rows:
                raise ValueError(
                    f"npu_fusion_attention: the packed sequences end at {list(ends)[-1:]}, the "
                    f"tensor has {rows} rows; what is behind would be left as it is in memory"
                )
        segments = [
            (slice(*rows), slice(*columns))
            for rows, columns in zip(
                pairwise([0, *actual_seq_qlen]), pairwise([0, *actual_seq_kvlen]), strict=True
            )
        ]
    return _Attention(layout, masking, scale, pse, segments), q, k, v


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

    ========================= ===================================================================
    sparse_mode               what a query does not see
    ========================= ===================================================================
    0                         where the mask is True or the distance outside of pre/next_tockens
    1                         where the mask is True
    2 (compressed mask)       keys after it, both counted from the first
    3 (compressed mask)       keys after it, both counted from the last
    4 (compressed mask)       keys outside of pre/next_tockens, counted from the last
    ========================= ===================================================================

    With ``atten_mask=None`` it sees everything in every mode.

    Returns:
        The output, like ``query``; maximum and sum of each row's softmax, fp32 ``[B, A, S, 8]``
        (``[T, A, 8]`` for TND); an empty tensor; and three numbers for dropout, zero.
    """
    call, q, k, v = _attention_call(
        "npu_fusion_attention", query, key, value, head_num, input_layout, scale, **keywords
    )
    out, top, total = call.forward(q, k, v)
    statistics = [x.expand(-1, -1, -1, _STATISTICS) for x in (top, total)]
    if input_layout == "TND":
        statistics = [x.squeeze(0).transpose(0, 1) for x in statistics]
    top, total = (x.contiguous() for x in statistics)
    return call.layout.gather(out, query.dtype), top, total, query.new_empty(0), 0, 0, 0


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward of :func:`fusion_attention`.

    It takes the statistics as they are given: ring attention passes those of all blocks together.

    Returns:
        The gradients of query, key and value, and two empty tensors for those of pse and sink.
    """
    name = "npu_fusion_attention_grad"
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise ValueError(
            f"{name}: softmax_max, softmax_sum and attention_in are results of the forward; pass "
            "all three"
        )
    call, q, k, v = _attention_call(
        name, query, key, value, head_num, input_layout, scale_value, **keywords
    )
    statistics = softmax_max, softmax_sum
    if input_layout == "TND":
        statistics = softmax_max.transpose(0, 1)[None], softmax_sum.transpose(0, 1)[None]
    top, total = (x[..., :1] for x in statistics)
    out, grad = (call.layout.spread(x, v.shape[-1]) for x in (attention_in, dy))
    made = call.backward(q, k, v, out, grad, (top, total))
    grad_q, grad_k, grad_v = (call.layout.gather(x, query.dtype) for x in made)
    return grad_q, grad_k, grad_v, query.new_empty(0), query.new_empty(0)


class _FusionAttention(torch.autograd.Function):
    """The operator's gradient on the CPU, by the operator that the device's uses, too."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keywords: dict[str, Any],
    ) -> Any:
        results = fusion_attention(query, key, value, **keywords)
        ctx.save_for_backward(query, key, value, *results[:3])
        ctx.keywords = keywords
        ctx.mark_non_differentiable(*results[1:4])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, top, total = ctx.saved_tensors
        keywords = dict(ctx.keywords)
        if keywords.get("pse") is not None and keywords["pse"].requires_grad:
            raise NotImplementedError("npu_fusion_attention: the gradient of pse is not emulated")
        grads = torch.ops.npu.npu_fusion_attention_grad(
            query,
            key,
            value,
            grad,
            softmax_max=top,
            softmax_sum=total,
            attention_in=out,
            scale_value=keywords.pop("scale", 1.0),
            **keywords,
        )
        return *grads[:3], None


def _differentiable_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any
) -> Any:
    return _FusionAttention.apply(query, key, value, keywords)


# ------------------------------------------------------------------------ optimizer


def apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW step on ``out = (weight, first moment, second moment)``, in place.

    Args:
        beta1_power, beta2_power: the powers **before** this step, ``beta ** (step - 1)``; the
            operator multiplies by beta once more.
    """
    if amsgrad:
        raise NotImplementedError("npu_apply_adam_w: amsgrad is not emulated; turn it off")
    weight, first, second = out
    gradient = -grad.float() if maximize else grad.float()
    moment = first.float() * beta1 + gradient * (1 - beta1)
    square = second.float() * beta2 + gradient.square() * (1 - beta2)
    step = moment / (1 - beta1_power * beta1)
    step /= (square / (1 - beta2_power * beta2)).sqrt() + epsilon
    weight.copy_(weight.float() * (1 - lr * weight_decay) - lr * step)
    first.copy_(moment)
    second.copy_(square)
    return weight, first, second


# ------------------------------------------------------- GEMM with a collective (MC2)


def _check_mc2(
    name: str, x: torch.Tensor, x2: torch.Tensor, hcom: str, world_size: int
) -> dist.ProcessGroup:
    if x.dim() != 2 or x2.dim() != 2:
        raise ValueError(f"{name}: needs matrices, not {tuple(x.shape)} and {tuple(x2.shape)}")
    # In the rehearsal the name of a group's communicator is the name of the group.
    c10d: Any = dist.distributed_c10d
    group: dist.ProcessGroup = c10d._resolve_process_group(hcom)
    if group.size() != world_size:
        raise ValueError(f"{name}: world_size {world_size}, but group {hcom} has {group.size()}")
    return group


def all_gather_base_mm(
    input: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: torch.Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``all_gather(input) @ x2 + bias`` and the gathered input, over the group named ``hcom``.

    The device's limits (k from 256 to 65534, 2, 4 or 8 ranks, 16 bits) are not checked.
    """
    name = "npu_all_gather_base_mm"
    _refuse(name, others)
    if gather_index != 0:
        raise NotImplementedError(f"{name}: gather_index {gather_index} is not emulated; 0 is")
    group = _check_mc2(name, input, x2, hcom, world_size)
    whole = input.new_empty((input.shape[0] * world_size, input.shape[1]))
    dist.all_gather_into_tensor(whole, input.contiguous(), group=group)
    product = whole @ x2 if bias is None else torch.addmm(bias, whole, x2)
    return product, whole if gather_output else input.new_empty(0)


def mm_reduce_scatter_base(
    input: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    **others: Any,
) -> torch.Tensor:
    """``reduce_scatter(input @ x2)`` over the group named ``hcom``; limits: as the other."""
    name = "npu_mm_reduce_scatter_base"
    # On the device, too, a bias is no part of what can be used.
    _refuse(name, others)
    if reduce_op != "sum":
        raise NotImplementedError(f"{name}: reduce_op {reduce_op!r} is not emulated; sum is")
    group = _check_mc2(name, input, x2, hcom, world_size)
    if input.shape[0] % world_size:
        raise ValueError(
            f"{name}: {input.shape[0]} rows are not divisible by {world_size} ranks; pad them"
        )
    out = input.new_empty((input.shape[0] // world_size, x2.shape[1]))
    dist.reduce_scatter_tensor(out, input @ x2, group=group)
    return out


_COMPOSED: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_swiglu": swiglu,
    "npu_rotary_mul": rotary_mul,
}
_KERNELS: dict[str, Callable[..., Any]] = {
    "npu_apply_adam_w.out": apply_adam_w,
    "npu_all_gather_base_mm": all_gather_base_mm,
    "npu_mm_reduce_scatter_base": mm_reduce_scatter_base,
}
