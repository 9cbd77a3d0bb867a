"""Attention in plain torch against unfused attention.

The other kernels are compared in :mod:`tests.random_networks`.
"""

import pytest
import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.ops.attention_runs import AttentionRuns
from tests.kernels.attention_lines import CASES, MASKED, Case, assert_close, by_chunks, unfused


@pytest.mark.parametrize("case", CASES + MASKED, ids=str)
def test_attention_by_chunks_equals_whole_attention(case: Case) -> None:
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
