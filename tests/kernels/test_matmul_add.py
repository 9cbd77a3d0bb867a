"""Which function accumulates a weight gradient on an NPU; the choice needs no NPU."""

from __future__ import annotations

import pytest
import torch

from commfuse_npu.kernels import cpu, npu, use_matmul_add

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Recorder:
    """A stand-in with the argument order of MindSpeed's functions; counts its calls."""

    calls = 0

    def __call__(
        self, total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        self.calls += 1
        # MindSpeed copies a strided operand into memory that it has freed when the GEMM runs.
        assert all(x.is_contiguous() for x in (total_input, grad_output, main_grad))
        main_grad.add_(grad_output.t().float() @ total_input.float())


def accumulate(factors: torch.dtype, total: torch.dtype, strided: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randint(-3, 4, (rows, columns), generator=generator).to(dtype)
        return values.t().contiguous().t() if name == strided else values

    grad_output = drawn("grad_output", 6, 2, factors)
    total_input = drawn("total_input", 6, 5, factors)
    actual = drawn("total", 2, 5, total)
    expected = actual.clone()
    npu.accumulate_weight_gradient(actual, grad_output, total_input)
    cpu.accumulate_weight_gradient(expected, grad_output, total_input)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("factors", "total", "strided", "fp32", "sixteen_bits"),
    [
        (BF16, FP32, "", 1, 0),
        (FP16, FP32, "", 0, 0),
        (BF16, BF16, "", 0, 1),
        (FP16, FP16, "", 0, 1),
        (FP32, FP32, "", 0, 0),
        # Strided factors are copied first; for a strided sum there is plain torch.
        (BF16, FP32, "grad_output", 1, 0),
        (BF16, BF16, "total_input", 0, 1),
        (BF16, FP32, "total", 0, 0),
    ],
)
def test_what_was_handed_in_is_used_where_it_fits_and_until_it_is_taken_back(
    factors: torch.dtype, total: torch.dtype, strided: str, fp32: int, sixteen_bits: int
) -> None:
    first, second = Recorder(), Recorder()
    use_matmul_add(fp32=first, sixteen_bits=second)
    try:
        accumulate(factors, total, strided)
        assert (first.calls, second.calls) == (fp32, sixteen_bits)
        use_matmul_add(fp32=first)
        accumulate(factors, total, strided)
        assert (first.calls, second.calls) == (2 * fp32, sixteen_bits)
    finally:
        use_matmul_add()
    accumulate(factors, total, strided)
    assert (first.calls, second.calls) == (2 * fp32, sixteen_bits)
