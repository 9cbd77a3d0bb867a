"""One call for several GEMMs."""

from __future__ import annotations

import pytest
import torch

from commfuse_npu.tools.measure.grouped import grouped_gemm


def test_one_call_makes_what_several_make() -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no grouped GEMM")
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32, 48).bfloat16()
    name, call = grouped_gemm(x, weight, 4)
    assert name == "torch._grouped_mm"
    for found, part in zip(call(), x.chunk(4), strict=True):
        torch.testing.assert_close(found, part @ weight)
