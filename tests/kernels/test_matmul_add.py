"""Which function accumulates a weight gradient on an NPU; the choice needs no NPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
import torch

from commfuse_npu.kernels import cpu, npu, use_matmul_add


class Recorder:
    """In the order of arguments of MindSpeed's functions."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        self.calls += 1
        # MindSpeed copies a strided operand into memory that it has freed when the GEMM runs.
        assert total_input.is_contiguous()
        assert grad_output.is_contiguous()
        assert main_grad.is_contiguous()
        main_grad.add_(grad_output.t().float() @ total_input.float())


@pytest.fixture
def given() -> Iterator[tuple[Recorder, Recorder]]:
    recorders = Recorder(), Recorder()
    use_matmul_add(fp32=recorders[0], sixteen_bits=recorders[1])
    yield recorders
    use_matmul_add()


def accumulated(
    factors: torch.dtype, total: torch.dtype, strided: Collection[str] = ()
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)

    def drawn(name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randint(-3, 4, (rows, columns), generator=generator).to(dtype)
        return values.t().contiguous().t() if name in strided else values

    grad_output = drawn("grad_output", 6, 2, factors)
    total_input = drawn("total_input", 6, 5, factors)
    found = drawn("total", 2, 5, total)
    expected = found.clone()
    npu.accumulate_weight_gradient(found, grad_output, total_input)
    cpu.accumulate_weight_gradient(expected, grad_output, total_input)
    assert torch.equal(found, expected)
    return found


@pytest.mark.parametrize(
    ("factors", "total", "calls"),
    [
        (torch.bfloat16, torch.float32, (1, 0)),
        (torch.float16, torch.float32, (0, 0)),
        (torch.bfloat16, torch.bfloat16, (0, 1)),
        (torch.float16, torch.float16, (0, 1)),
        (torch.float32, torch.float32, (0, 0)),
    ],
)
def test_what_was_handed_in_is_used_where_it_fits(given, factors, total, calls) -> None:
    accumulated(factors, total)
    assert tuple(recorder.calls for recorder in given) == calls


@pytest.mark.parametrize(
    ("strided", "total", "calls"),
    [
        (("grad_output",), torch.float32, 1),
        (("total_input",), torch.bfloat16, 1),
        (("total",), torch.float32, 0),  # plain torch's
    ],
)
def test_strided_factors_are_copied_first(given, strided, total, calls: int) -> None:
    accumulated(torch.bfloat16, total, strided)
    assert sum(recorder.calls for recorder in given) == calls


def test_plain_torch_without_and_after() -> None:
    recorder = Recorder()
    accumulated(torch.bfloat16, torch.float32)
    use_matmul_add(fp32=recorder)
    accumulated(torch.bfloat16, torch.bfloat16)
    assert recorder.calls == 0
    accumulated(torch.bfloat16, torch.float32)
    use_matmul_add()
    accumulated(torch.bfloat16, torch.float32)
    assert recorder.calls == 1
