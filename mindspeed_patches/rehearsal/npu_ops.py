"""CPU kernels for operators of torch_npu and of MindSpeed, in plain torch.

:func:`register_cpu_kernels` adds them to the real torch_npu.  Names, schemas, defaults and meta
kernels are those of the wheel; only the implementation for CPU tensors is new.  They follow the
operators' documentation and MindSpeed's calls, and were never compared with an NPU.  Everything is
computed in fp32 and rounded once to the dtype of the input; an NPU kernel rounds elsewhere.
Anything that is not emulated raises NotImplementedError; no call silently returns something else.

``npu_rms_norm``, ``npu_swiglu``, ``npu_rotary_mul`` and ``npu_fusion_attention`` have gradients,
through the torch operations they consist of; the others have none.

MindSpeed compiles operators of its own against CANN on first use.  Its loader checks a table of
loaded operators before it compiles; :func:`install_mindspeed_ops` adds those of dense models and of
experts to the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch.nn.functional import silu

from commfuse_npu.kernels.cpu import accumulate_weight_gradient
from mindspeed_patches.rehearsal.attention_op import register_attention

Groups = torch.Tensor | Sequence[int]
Tensors = list[torch.Tensor]

# Kept alive: kernels are unregistered together with the object that registered them.
_library = torch.library.Library("npu", "IMPL")


@cache
def register_cpu_kernels() -> None:
    """Give the ``npu::`` operators of torch_npu, which must be imported, CPU kernels."""
    for kernel in (rms_norm, swiglu, rotary_mul):
        _library.impl(f"npu_{kernel.__name__}", kernel, "CompositeImplicitAutograd")
    register_attention(_library)
    _library.impl("npu_apply_adam_w.out", apply_adam_w, "CPU")


def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input / rms(input) * gamma`` over the dimensions of ``gamma``, the last of ``input``.

    Returns:
        The result, in the dtype of ``input``, and ``1 / rms`` in fp32, ``[..., 1]``.
    """
    x = input.float()
    over = tuple(range(-gamma.dim(), 0))
    inverse = torch.rsqrt(x.square().mean(over, keepdim=True) + epsilon)
    return (x * inverse * gamma.float()).to(input.dtype), inverse


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(first half) * second half`` along ``dim``."""
    gate, up = input.float().chunk(2, dim)
    return (silu(gate) * up).to(input.dtype)


def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
) -> torch.Tensor:
    """Rotary embedding: ``input * r1 + turned(input) * r2``; r1 and r2 are cosines and sines.

    Args:
        rotary_mode: ``half`` pairs feature i with ``i + D/2``, ``interleave`` 2i with ``2i + 1``.
    """
    x = input.float()
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    elif rotary_mode == "interleave":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        raise NotImplementedError(
            f"npu_rotary_mul: rotary_mode {rotary_mode!r} is not emulated; use half or interleave"
        )
    return (x * r1.float() + turned * r2.float()).to(input.dtype)


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
    if amsgrad or maximize:
        raise NotImplementedError(
            "npu_apply_adam_w: amsgrad and maximize are not emulated; turn them off"
        )
    weight, first, second = out
    gradient = grad.float()
    moment = first.float() * beta1 + gradient * (1 - beta1)
    square = second.float() * beta2 + gradient.square() * (1 - beta2)
    step = moment / (1 - beta1_power * beta1)
    step /= (square / (1 - beta2_power * beta2)).sqrt() + epsilon
    weight.copy_(weight.float() * (1 - lr * weight_decay) - lr * step)
    first.copy_(moment)
    second.copy_(square)
    return weight, first, second


# ------------------------------------------------------------------------ MindSpeed


def npu_rotary_position_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0
) -> torch.Tensor:
    """Rotate pairs: halves of the last dimension (mode 0), or neighbors in it (mode 1)."""
    return rotary_mul(x, cos, sin, ("half", "interleave")[mode])


def npu_matmul_add_fp32(
    grad_output: torch.Tensor, total_input: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Our weight-gradient kernel, which the fused layers use too, with the extension's arguments.

    It refuses strided tensors, for which the extension would read freed memory.
    """
    for tensor in (grad_output, total_input, main_grad):
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"npu_matmul_add_fp32: a tensor of shape {tuple(tensor.shape)} has strides "
                f"{tensor.stride()}; make it contiguous"
            )
    accumulate_weight_gradient(main_grad, grad_output, total_input)


def npu_groupmatmul_add_fp32(
    x: torch.Tensor, dy: torch.Tensor, groups: torch.Tensor, grad: torch.Tensor
) -> None:
    """Add ``x[group]^T @ dy[group]`` to the fp32 ``grad``, ``[G, I, O]`` in any shape, in place."""
    (added,) = npu_gmm([x.mT.float()], [dy.float()], [], groups, 2, 0)
    grad.add_(added.view_as(grad))


# Rows of experts, [T, I], are sorted by group; weights are [G, I, O]. Each tensor and each result
# is a list with one element.


def npu_gmm(
    x: Tensors, weight: Tensors, bias: Tensors, groups: Groups, group_type: int, kind: int
) -> Tensors:
    """``x[group] @ weight[group]`` for each group, ``[T, O]``.

    With ``group_type`` 2, for each group the product of columns of ``x``, ``[I, T]``, and rows of
    ``weight``, ``[T, O]``: ``[G, I, O]``.
    """
    if bias or group_type not in (0, 2):
        raise NotImplementedError(
            f"npu_gmm: group_type {group_type} or a bias is not emulated; use 0 or 2 without"
        )
    if group_type:
        sizes = _sizes(groups, kind, x[0].shape[1])
        pairs = zip(x[0].split(sizes, 1), weight[0].split(sizes), strict=True)
        return [torch.stack([columns @ rows for columns, rows in pairs])]
    pairs = zip(x[0].split(_sizes(groups, kind, len(x[0]))), weight[0], strict=True)
    return [torch.cat([rows @ of_group for rows, of_group in pairs])]


def npu_gmm_backward(
    grad: Tensors, x: Tensors, weight: Tensors, groups: Groups, kind: int
) -> tuple[Tensors, Tensors, Tensors]:
    """The gradients of ``x`` and ``weight``; there is none of a bias."""
    dx, *_ = npu_gmm_backward_fusion(grad, weight, groups, kind)
    return dx, npu_gmm([x[0].mT], grad, [], groups, 2, kind), []


def npu_gmm_backward_fusion(
    grad: Tensors, weight: Tensors, groups: Groups, kind: int
) -> tuple[Tensors, Tensors, Tensors]:
    """The gradient of ``x``; :func:`npu_groupmatmul_add_fp32` adds that of the weight."""
    return npu_gmm(grad, [weight[0].mT], [], groups, 0, kind), [], []


def _sizes(groups: Groups, kind: int, rows: int) -> list[int]:
    """Rows of each group, from the ends of groups (kind 0) or from their sizes (kind 1)."""
    numbers = torch.as_tensor(groups, dtype=torch.int64)
    sizes = numbers if kind else numbers.diff(prepend=numbers.new_zeros(1))
    if int(sizes.sum()) != rows:
        raise ValueError(
            f"grouped matmul: the groups end at [{int(sizes.sum())}], the tensor has {rows} rows; "
            "the rows behind would be uninitialized"
        )
    return list(sizes.tolist())


_COMPILED = (
    *("npu_rotary_position_embedding", "npu_matmul_add_fp32", "npu_groupmatmul_add_fp32"),
    *("grouped_matmul", "grouped_matmul_v2"),
)
"""Extensions of MindSpeed; this module has the functions of all of them."""


def install_mindspeed_ops() -> None:
    """Fill the loader's table; MindSpeed must be importable, and torch_npu set up."""
    from mindspeed.op_builder.builder import AS_LIBRARY, MindSpeedOpBuilder

    # Its loader requires the path of ATB before it checks the table, and so does the feature.
    os.environ.setdefault("ATB_HOME_PATH", "emulated")
    MindSpeedOpBuilder._loaded_ops.update(dict.fromkeys(_COMPILED, sys.modules[__name__]))
    from mindspeed.ops import gmm

    # The functions that it uses on a device, with an autograd function inside.
    AS_LIBRARY.impl("npu_gmm.Tensor", gmm._npu_gmm, "CPU")
    AS_LIBRARY.impl("npu_gmm.List", gmm._npu_gmm, "CPU")
    AS_LIBRARY.impl("npu_gmm_v2.Tensor", gmm._npu_gmm_v2, "CPU")
