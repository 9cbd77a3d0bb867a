"""Accumulates the gradient of a weight, also into Megatron's ``main_grad``."""

from __future__ import annotations

import torch

from commfuse_npu.kernels import kernels_for

__all__ = ["WeightGradient"]

_MAIN_GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class WeightGradient:
    """The gradient of one weight in one backward: ``sum of grad_output[b]^T @ input[b]``.

    Args:
        weight: ``[O, I]``.  With ``main_grad`` it uses the attributes of Megatron's weights:
            ``main_grad`` (fp32, fp16 or bf16) receives the sum.  If ``grad_added_to_main_grad``
            exists it is set, and :meth:`result` returns a tensor of the right shape instead of the
            gradient: zeros if ``zero_out_wgrad`` is set, else with undefined contents.
        main_grad: accumulate into ``weight.main_grad`` (Megatron's gradient_accumulation_fusion).
        blocks: whether :meth:`add` is called with blocks of rows instead of once with all.
        needed: whether a gradient is needed; else :meth:`result` returns ``None``.

    Raises:
        RuntimeError: ``main_grad`` is missing or has another dtype.
    """

    def __init__(
        self, weight: torch.Tensor, *, main_grad: bool, blocks: bool, needed: bool = True
    ) -> None:
        self._weight, self.needed = weight, needed
        self._main_grad: torch.Tensor | None = None
        if needed and main_grad:
            target = getattr(weight, "main_grad", None)
            dtype = None if target is None else target.dtype
            if dtype not in _MAIN_GRAD_DTYPES:
                raise RuntimeError(
                    f"weight.main_grad is {dtype}; gradient accumulation fusion needs the float32, "
                    "float16 or bfloat16 one that Megatron's DistributedDataParallel sets; wrap "
                    "the model or turn the fusion off"
                )
            self._main_grad = target
        # The accumulator.  Blocks are summed in fp32 and rounded once.
        self._total = self._main_grad
        if needed and blocks and (self._total is None or self._total.dtype != torch.float32):
            self._total = torch.zeros_like(weight, dtype=torch.float32)
        self._grad: torch.Tensor | None = None
        if self._total is not None:
            self._accumulate = kernels_for(weight.device).accumulate_weight_gradient

    def add(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
        """Add the product for these rows: ``[rows, O]`` and ``[rows, I]``."""
        if self._total is not None:
            self._accumulate(self._total, grad_output, total_input)
        else:
            self._grad = grad_output.t().matmul(total_input)

    def result(self) -> torch.Tensor | None:
        """The tensor, or ``None``, that the backward returns for the weight."""
        weight, target = self._weight, self._main_grad
        if target is None:
            return self._grad if self._total is None else self._total.to(weight.dtype)
        if self._total is not None and self._total is not target:
            target.add_(self._total)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # Megatron's hooks need a gradient of this shape, and its contents only if zero_out_wgrad
        # asks for zeros.
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return make(target.shape, dtype=weight.dtype, device=weight.device)
