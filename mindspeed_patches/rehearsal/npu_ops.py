"""CPU kernels for the torch_npu operators that a dense Llama needs, in plain torch.

:func:`register_cpu_kernels` adds them to the real torch_npu.  Names, schemas, defaults and meta
kernels are those of the wheel; only the implementation for CPU tensors is new.  They follow the
operators' documentation and MindSpeed's calls, and were never compared with an NPU.  Everything is
computed in fp32 and rounded once to the dtype of the input; an NPU kernel rounds elsewhere.
Anything that is not emulated raises NotImplementedError; no call silently returns something else.

``npu_rms_norm``, ``npu_swiglu``, ``npu_rotary_mul`` and ``npu_fusion_attention`` have gradients,
through the torch operations they consist of; the others have none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu

from mindspeed_patches.rehearsal.attention_op import refuse, register_attention

__all__ = ["register_cpu_kernels"]

_library: list[torch.library.Library] = []


def register_cpu_kernels() -> None:
    """Give the ``npu::`` operators of this module CPU kernels; later calls do nothing."""
    if _library:
        return
    if not hasattr(torch.ops.npu, "npu_fusion_attention"):
        raise RuntimeError(
            "the npu:: operators are not defined; import torch_npu before register_cpu_kernels()"
        )
    # Kept alive: kernels are unregistered together with the object that registered them.
    library = torch.library.Library("npu", "IMPL")
    _library.append(library)
    for kernel in (rms_norm, swiglu, rotary_mul):
        library.impl(f"npu_{kernel.__name__}", kernel, "CompositeImplicitAutograd")
    register_attention(library)
    library.impl("npu_apply_adam_w.out", apply_adam_w, "CPU")


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
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotary embedding: ``input * r1 + turned(input) * r2``; r1 and r2 are cosines and sines.

    Args:
        rotary_mode: ``half`` pairs feature i with ``i + D/2``, ``interleave`` 2i with ``2i + 1``.
    """
    refuse("npu_rotary_mul", {"rotate": rotate})
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
