"""Where a weight gradient is accumulated, and how often it is rounded."""

from __future__ import annotations

import pytest
import torch

from commfuse_npu.kernels.cpu import accumulate_weight_gradient
from commfuse_npu.ops.weight import WeightGradient


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
    with pytest.raises(RuntimeError, match=r"needs weight.main_grad, which Megatron's"):
        WeightGradient(weight, main_grad=True, blocks=False)
    weight.main_grad = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"main_grad is torch.float64; .* needs float32"):
        WeightGradient(weight, main_grad=True, blocks=False)


def test_one_product_stays_one_product() -> None:
    gradient = WeightGradient(torch.zeros(1, 1), main_grad=False, blocks=False)
    gradient.add(torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="a second product for a weight gradient"):
        gradient.add(torch.ones(2, 1), torch.ones(2, 1))
    assert gradient.result().item() == 2
