"""The kernels in plain torch against unfused attention."""

from __future__ import annotations

import pytest
import torch

from commfuse_npu.kernels import cpu, gemm_into
from commfuse_npu.ops.attention_runs import AttentionRuns
from tests.kernels.attention_lines import CASES, MASKED, Case, assert_close, by_chunks, unfused

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gemm_writes_into_a_run_of_rows_and_nowhere_else(dtype: torch.dtype) -> None:
    # Whole numbers: nothing is rounded, whichever kernel the library takes.
    a, b = (torch.arange(n * m).remainder(7).reshape(n, m).to(dtype) for n, m in ((3, 8), (8, 5)))
    whole = torch.full((7, 5), 9.0, dtype=dtype)
    gemm_into(whole[2:5], a, b)
    assert torch.equal(whole[2:5], a @ b)
    assert torch.equal(whole[[0, 1, 5, 6]], torch.full((4, 5), 9.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partials_are_added_in_order_each_sum_rounded_or_all_once(dtype: torch.dtype) -> None:
    partials = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    each, exact = partials[0].clone(), partials[0].float()
    for partial in partials[1:]:
        each, exact = each + partial, exact + partial.float()
    assert not torch.equal(each, exact.to(dtype)), "these numbers do not tell how often was rounded"
    rounded, backwards, single = (torch.empty(1, 64, dtype=dtype) for _ in range(3))
    total = partials[:1].float()
    cpu.sum_parts(rounded, [(partials.clone(), 5)])
    cpu.sum_parts(backwards, [(partials.flip(0), 5)])
    cpu.sum_parts(single, [(partials, 5)], dtype=torch.float32)
    cpu.sum_parts(total, [(total, 1), (partials[1:], 4)])
    assert torch.equal(rounded[0], each)
    assert not torch.equal(backwards[0], each), "these numbers do not tell the order"
    assert torch.equal(single[0], exact.to(dtype))
    assert torch.equal(total[0], exact)


@pytest.mark.parametrize("case", CASES + MASKED, ids=str)
def test_attention_by_chunks_is_attention_over_the_whole_sequence(case: Case) -> None:
    assert_close(by_chunks(cpu, case), unfused(case), case.dtype)


def test_small_gradients_of_many_chunks_are_not_lost() -> None:
    """256 + 1 cannot be represented in bf16: sums over chunks in bf16 would stop growing."""
    q = torch.ones(4, 1, 1, 1, dtype=torch.bfloat16)
    runs, grad = AttentionRuns(causal=False), torch.tensor([256.0, 1, 1, 1]).bfloat16()
    runs.begin(q, q[:1], q[:1], keep=True)
    rows = [slice(row, row + 1) for row in range(4)]
    for row in rows:
        runs.forward(row)
    runs.resume(runs.saved())
    for row in rows:
        runs.backward(grad[row], row)
    assert runs.gradients()[2].item() == 260.0  # 259, rounded once
