"""The NPU's attention kernels on an emulation of its operators, against plain torch and fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.kernels import npu as kernels
from commfuse_npu.kernels.npu import PackedRun, WholeRun
from mindspeed_patches.rehearsal.npu_ops import register_cpu_kernels
from tests.kernels.attention_lines import (
    CASES,
    MASKED,
    Case,
    assert_close,
    by_chunks,
    unfused,
)


def check(case: Case) -> None:
    """In the worker."""
    register_cpu_kernels()
    found = by_chunks(kernels, case)
    assert_close(found, unfused(case), case.dtype)
    assert_close(found, by_chunks(cpu, case), case.dtype)


def check_all(cases: list[Case]) -> None:
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("cases", [CASES, MASKED], ids=["chunks of queries", "masks"])
def test_chunks_of_queries_give_the_whole_attention(npu, cases: list[Case]) -> None:
    for at in range(0, len(cases), 8):
        npu.run(check_all, cases[at : at + 8])


def with_arguments(**changes: object) -> Callable[[Any], Any]:
    """The operator, with other arguments than those that the kernels pass."""
    return lambda operator: lambda *args, **kwargs: operator(*args, **{**kwargs, **changes})


def documents_forgotten(init: Any) -> Any:
    """One piece with all queries and all keys, which are as many as before."""

    def forgetful(self, pieces, batch):
        init(self, pieces, batch)
        self.query_ends, self.key_ends = self.query_ends[-1:], self.key_ends[-1:]

    return forgetful


def another_sample(add: Any) -> Any:
    return lambda self, total, x: add(self, total.flip(1), x)


def future_of_the_data(masking: Any) -> Any:
    """The mask of the data alone, without the causal one."""
    return lambda device, causal, hidden: masking(device, causal and hidden is None, hidden)


PLAIN = Case((4, 2), (5, 4, 3))
DOCUMENTS = Case((4, 2), (5, 8, 1, 10), mask="documents")
HIDDEN = Case((4, 2), (5, 8, 1, 10), mask="hidden and causal")
WINDOW = with_arguments(sparse_mode=4, pre_tockens=3)
OPS = torch.ops.npu
MUTANTS: dict[str, tuple[Case, Any, str, Callable[[Any], Any]]] = {
    # Causal from the top left; of one chunk, or queries as many as keys, it looks right.
    "mode_two": (PLAIN, kernels, "_BOTTOM_RIGHT", lambda _: 2),
    "another_layout": (PLAIN, WholeRun, "layout", lambda _: "BSH"),
    "window_of_four_keys": (PLAIN, OPS, "npu_fusion_attention", WINDOW),
    "no_scale_back": (PLAIN, OPS, "npu_fusion_attention_grad", with_arguments(scale_value=1.0)),
    "documents_forgotten": (DOCUMENTS, PackedRun, "__init__", documents_forgotten),
    "gradients_of_another_sample": (DOCUMENTS, PackedRun, "add_to_keys", another_sample),
    "future_of_the_data": (HIDDEN, kernels, "_masking", future_of_the_data),
}


def noticed(name: str) -> str:
    """In the worker: what the check says with a fault planted."""
    case, owner, attribute, fault = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, fault(getattr(owner, attribute)))
        try:
            check(case)
        except (AssertionError, ValueError) as error:
            return repr(error)
    return ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_noticed(npu, name: str) -> None:
    npu.run(check, MUTANTS[name][0])
    # The layout by the shapes, everything else by the numbers.
    assert ("do not fit" if name == "another_layout" else "off by") in npu.run(noticed, name)
