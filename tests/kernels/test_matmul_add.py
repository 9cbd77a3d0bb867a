"""Which function accumulates a weight gradient on an NPU; the choice needs no NPU."""

from __future__ import annotations

from collections.abc import Iterator

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
        main_grad.add_(grad_output.t().float() @ total_input.float())


@pytest.fixture
def given() -> Iterator[tuple[Recorder, Recorder]]:
    recorders = Recorder(), Recorder()
    use_matmul_add(fp32=recorders[0], sixteen_bits=recorders[1])
    yield recorders
    use_matmul_add()


def accumulated(factors: torch.dtype, total: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    grad_output = torch.randint(-3, 4, (6, 2), generator=generator).to(factors)
    total_input = torch.randint(-3, 4, (6, 5), generator=generator).to(factors)
    found = torch.full((2, 5), 3.0, dtype=total)
    npu.accumulate_weight_gradient(found, grad_output, total_input)
    expected = torch.full((2, 5), 3.0, dtype=total)
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


def test_plain_torch_without_and_after() -> None:
    recorder = Recorder()
    accumulated(torch.bfloat16, torch.float32)
    use_matmul_add(fp32=recorder)
    accumulated(torch.bfloat16, torch.bfloat16)
    assert recorder.calls == 0
    accumulated(torch.bfloat16, torch.float32)
    assert recorder.calls == 1
    use_matmul_add()
    accumulated(torch.bfloat16, torch.float32)
    assert recorder.calls == 1
