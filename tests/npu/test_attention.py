"""The NPU's attention kernels on an emulation of its operators, against plain torch and fp64."""

from __future__ import annotations

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


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_of_queries_give_the_whole_attention(npu, heads, causal) -> None:
    cases = [case for case in CASES if (case.heads, case.causal) == (heads, causal)]
    assert len(cases) >= 3
    npu.run(check_all, cases)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_documents_and_masks_of_the_data(npu, heads, batch) -> None:
    cases = [case for case in MASKED if (case.heads, case.batch) == (heads, batch)]
    assert len(cases) >= 10
    npu.run(check_all, cases)


def with_arguments(name: str, **changes: object) -> tuple[object, str, object]:
    """The operator, with other arguments than those that the kernels pass."""
    original = getattr(torch.ops.npu, name)
    return torch.ops.npu, name, lambda *args, **kwargs: original(*args, **{**kwargs, **changes})


def statistics_swapped() -> tuple[object, str, object]:
    forward = kernels.attention_forward

    def swapped(*args, **kwargs):
        out, (maximum, total, reserved) = forward(*args, **kwargs)
        return out, (total, maximum, reserved)

    return kernels, "attention_forward", swapped


def documents_forgotten() -> tuple[object, str, object]:
    """One piece with all queries and all keys, which are as many as before."""
    init = PackedRun.__init__

    def forgetful(self, pieces, batch):
        init(self, pieces, batch)
        self.query_ends, self.key_ends = self.query_ends[-1:], self.key_ends[-1:]

    return PackedRun, "__init__", forgetful


def gradients_of_another_sample() -> tuple[object, str, object]:
    original = PackedRun.add_to_keys
    return PackedRun, "add_to_keys", lambda self, total, x: original(self, total.flip(1), x)


def future_of_the_data() -> tuple[object, str, object]:
    """The mask of the data alone, without the causal one."""
    masking = kernels._masking

    def seen(device, causal, hidden):
        return masking(device, causal and hidden is None, hidden)

    return kernels, "_masking", seen


PLAIN = Case((4, 2), (5, 4, 3))
DOCUMENTS = Case((4, 2), (5, 8, 1, 10), mask="documents")
HIDDEN = Case((4, 2), (5, 8, 1, 10), mask="hidden and causal")
MUTANTS = {
    # Causal from the top left.
    "mode_two": (PLAIN, lambda: (kernels, "_BOTTOM_RIGHT", 2)),
    "mode_two_of_documents": (DOCUMENTS, lambda: (kernels, "_BOTTOM_RIGHT", 2)),
    "no_mask": (PLAIN, lambda: (kernels, "_causal_mask", lambda device: None)),
    "another_layout": (PLAIN, lambda: (WholeRun, "layout", "BSH")),
    "statistics_swapped": (PLAIN, statistics_swapped),
    "window_of_four_keys": (
        PLAIN,
        lambda: with_arguments("npu_fusion_attention", sparse_mode=4, pre_tockens=3),
    ),
    "scale_forgotten_in_the_backward": (
        PLAIN,
        lambda: with_arguments("npu_fusion_attention_grad", scale_value=1.0),
    ),
    "documents_forgotten": (DOCUMENTS, documents_forgotten),
    "gradients_of_another_sample": (DOCUMENTS, gradients_of_another_sample),
    "future_of_the_data": (HIDDEN, future_of_the_data),
}


def noticed(name: str | None, case: Case) -> str:
    """In the worker: what the check says with a fault planted, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setattr(*MUTANTS[name][1]())
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
