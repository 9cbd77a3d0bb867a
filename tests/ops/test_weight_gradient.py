"""Where a weight gradient is accumulated, and how often it is rounded."""

from __future__ import annotations

import pytest
import torch

from commfuse_npu.kernels.cpu import accumulate_weight_gradient
from commfuse_npu.ops.call import WeightGradient


def test_sixteen_bits_are_rounded_once() -> None:
    # 257 is not representable in bf16, 258 is: two products of 1 are added before rounding.
    ones = torch.ones(2, 1, dtype=torch.bfloat16)
    main_grad = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    accumulate_weight_gradient(main_grad, ones, ones)
    assert main_grad.item() == 258.0


@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16])
def test_blocks_are_summed_in_fp32(main_grad) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    if main_grad is not None:
        weight.main_grad = torch.zeros(1, 1, dtype=main_grad)
    gradient = WeightGradient(weight, main_grad=main_grad is not None, blocks=True)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    gradient.add(256 * one, one)
    gradient.add(one, one)
    gradient.add(one, one)
    result = gradient.result()
    total = result if main_grad is None else weight.main_grad
    assert total.item() == 258.0
    assert (result is None) == (main_grad is not None)


def test_odd_main_grads_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    for dtype in (None, torch.float64):
        if dtype is not None:
            weight.main_grad = torch.zeros(2, 3, dtype=dtype)
        with pytest.raises(RuntimeError, match=rf"main_grad is {dtype}; .* needs the float32, fl"):
            WeightGradient(weight, main_grad=True, blocks=False)
