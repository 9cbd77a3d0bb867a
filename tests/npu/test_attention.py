"""The NPU's attention kernels on an emulation of its operators, against plain torch and fp64."""

import pytest

from commfuse_npu.kernels import cpu
from commfuse_npu.kernels import npu as kernels
from mindspeed_patches.rehearsal.npu_ops import register_cpu_kernels
from tests.kernels.attention_lines import CASES, MASKED, Case, assert_close, by_chunks, unfused


def check(*cases: Case) -> None:
    """In the worker: the kernels against unfused attention and the CPU kernels."""
    register_cpu_kernels()
    for case in cases:
        results = by_chunks(kernels, case)
        try:
            assert_close(results, unfused(case), case.dtype)
            assert_close(results, by_chunks(cpu, case), case.dtype)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("cases", [CASES, MASKED], ids=["chunks of queries", "masks"])
def test_chunks_of_queries_give_the_whole_attention(npu, cases: list[Case]) -> None:
    npu.run(check, *cases)
