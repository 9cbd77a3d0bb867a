"""Where a weight gradient is accumulated, how often it is rounded, and by which function of an NPU.

The choice of the function needs no NPU.
"""

from typing import Any

import pytest
import torch

from commfuse_npu.kernels import cpu, npu, use_matmul_add
from commfuse_npu.ops.call import WeightGradient

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("factors", "total", "strided", "used"),
    [
        (BF16, FP32, None, "fp32"),
        (FP16, FP32, None, None),
        (BF16, BF16, None, "sixteen_bits"),
        (FP16, FP16, None, "sixteen_bits"),
        (FP32, FP32, None, None),
        # Strided factors are copied first; for a strided sum there is plain torch.
        (BF16, FP32, 1, "fp32"),
        (BF16, BF16, 2, "sixteen_bits"),
        (BF16, FP32, 0, None),
    ],
)
def test_a_given_tuning_is_used_until_it_is_taken_back(
    factors: torch.dtype, total: torch.dtype, strided: int | None, used: str | None
) -> None:
    generator, calls = torch.Generator().manual_seed(3), list[str]()

    def recorder(name: str) -> Any:
        def added(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
            # MindSpeed copies a strided operand into memory that it has freed when the GEMM runs.
            assert all(t.is_contiguous() for t in (x, grad_output, main_grad))
            cpu.accumulate_weight_gradient(main_grad, grad_output, x)
            calls.append(name)

        return added

    tensors = [
        torch.randint(-3, 4, shape, generator=generator).to(dtype)
        for shape, dtype in (((2, 5), total), ((6, 2), factors), ((6, 5), factors))
    ]
    if strided is not None:
        tensors[strided] = tensors[strided].t().contiguous().t()
    result, expected = tensors[0].clone(), tensors[0].clone()
    given = {name: recorder(name) for name in ("fp32", "sixteen_bits")}
    for functions in (given, {"fp32": given["fp32"]}, {}):
        use_matmul_add(**functions)
        calls.clear()
        npu.accumulate_weight_gradient(result, *tensors[1:])
        cpu.accumulate_weight_gradient(expected, *tensors[1:])
        assert calls == ([used] if used in functions else [])
        assert torch.equal(result, expected)


def test_sixteen_bits_are_rounded_once() -> None:
    # 257 is not representable in bf16, 258 is: two products of 1 are added before rounding.
    ones = torch.ones(2, 1, dtype=torch.bfloat16)
    main_grad = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    cpu.accumulate_weight_gradient(main_grad, ones, ones)
    assert main_grad.item() == 258.0


def test_odd_main_grads_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    for dtype in (None, torch.float64):
        if dtype is not None:
            weight.main_grad = torch.zeros(2, 3, dtype=dtype)
        with pytest.raises(RuntimeError, match=rf"main_grad is {dtype}; .* needs the float32, fl"):
            WeightGradient(weight, main_grad=True)
