"""The NPU's attention kernels on an emulation of its operators, against plain torch and fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.kernels import npu as kernels
from commfuse_npu.kernels.npu import PackedRun, WholeRun
from commfuse_npu.ops.attention_mask import AttentionMask
from mindspeed_patches.rehearsal.npu_ops import register_cpu_kernels
from tests.attention_masks import mask_arguments
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


def statistics_swapped(forward: Any) -> Any:
    def swapped(*args, **kwargs):
        out, (maximum, total, reserved) = forward(*args, **kwargs)
        return out, (total, maximum, reserved)

    return swapped


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
    # Causal from the top left.
    "mode_two": (PLAIN, kernels, "_BOTTOM_RIGHT", lambda _: 2),
    "mode_two_of_documents": (DOCUMENTS, kernels, "_BOTTOM_RIGHT", lambda _: 2),
    "no_mask": (PLAIN, kernels, "_causal_mask", lambda _: lambda device: None),
    "another_layout": (PLAIN, WholeRun, "layout", lambda _: "BSH"),
    "statistics_swapped": (PLAIN, kernels, "attention_forward", statistics_swapped),
    "window_of_four_keys": (PLAIN, OPS, "npu_fusion_attention", WINDOW),
    "no_scale_back": (PLAIN, OPS, "npu_fusion_attention_grad", with_arguments(scale_value=1.0)),
    "documents_forgotten": (DOCUMENTS, PackedRun, "__init__", documents_forgotten),
    "gradients_of_another_sample": (DOCUMENTS, PackedRun, "add_to_keys", another_sample),
    "future_of_the_data": (HIDDEN, kernels, "_masking", future_of_the_data),
}


def noticed(name: str | None, case: Case) -> str:
    """In the worker: what the check says with a fault planted, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            _, owner, attribute, fault = MUTANTS[name]
            patch.setattr(owner, attribute, fault(getattr(owner, attribute)))
        try:
            check(case)
        except (AssertionError, ValueError) as error:
            return repr(error)
    return ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_noticed(npu, name: str) -> None:
    case = MUTANTS[name][0]
    assert npu.run(noticed, None, case) == ""
    # The layout by the shapes, everything else by the numbers.
    message = "do not fit" if name == "another_layout" else "off by"
    assert message in npu.run(noticed, name, case)
    assert npu.run(noticed, None, case) == "", "the fault was left planted"


def test_mode_two_looks_right_for_the_first_chunk(npu) -> None:
    """Why one chunk, or queries as many as keys, would prove nothing."""
    assert npu.run(noticed, "mode_two", Case((4, 2), (12,))) == ""


def chunks_are_not_copied(mask: str, batch: int) -> list[bool]:
    """In the worker: whether the operator got the memory of the whole sequence."""
    register_cpu_kernels()
    whole = torch.randn(8, batch, 4, 16)
    run = slice(4, 6)
    keys, told = AttentionMask(**mask_arguments(mask, 8, batch)).of(run)
    original, same = torch.ops.npu.npu_fusion_attention, []

    def watched(*args, **kwargs):
        same.extend(x.untyped_storage().data_ptr() == whole.data_ptr() for x in args[:3])
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.npu, "npu_fusion_attention", watched)
        kernels.attention_forward(whole[run], whole[keys], whole[keys], **told)
    return same


def test_chunks_of_a_contiguous_sequence_are_not_copied(npu) -> None:
    assert npu.run(chunks_are_not_copied, "causal", 2) == [True] * 3
    assert npu.run(chunks_are_not_copied, "documents", 1) == [True] * 3
