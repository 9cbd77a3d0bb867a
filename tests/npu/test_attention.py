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


def mode_two() -> object:
    """Causal from the top left."""
    return kernels, "_BOTTOM_RIGHT", 2


def no_mask() -> object:
    return kernels, "_causal_mask", lambda device: None


def another_layout() -> object:
    return WholeRun, "layout", "BSH"


def statistics_swapped() -> object:
    forward = kernels.attention_forward

    def swapped(*args, **kwargs):
        out, (maximum, total, reserved) = forward(*args, **kwargs)
        return out, (total, maximum, reserved)

    return kernels, "attention_forward", swapped


def window() -> object:
    """Mode 4 instead of 3, with a window of four keys."""
    original = torch.ops.npu.npu_fusion_attention

    def windowed(*args, **kwargs):
        return original(*args, **{**kwargs, "sparse_mode": 4, "pre_tockens": 3})

    return torch.ops.npu, "npu_fusion_attention", windowed


def documents_forgotten() -> object:
    """One piece with all queries and all keys, which are as many as before."""
    init = PackedRun.__init__

    def forgetful(self, pieces, batch):
        init(self, pieces, batch)
        self.query_ends, self.key_ends = self.query_ends[-1:], self.key_ends[-1:]

    return PackedRun, "__init__", forgetful


def key_gradients_of_another_sample() -> object:
    original = PackedRun.add_to_keys

    def swapped(self, total, x):
        original(self, total.flip(1), x)

    return PackedRun, "add_to_keys", swapped


def future_of_the_data() -> object:
    """The mask of the data alone, without the causal one."""
    masking = kernels._masking

    def seen(device, causal, hidden):
        return masking(device, causal and hidden is None, hidden)

    return kernels, "_masking", seen


def scale_forgotten_in_the_backward() -> object:
    original = torch.ops.npu.npu_fusion_attention_grad

    def unscaled(*args, **kwargs):
        return original(*args, **{**kwargs, "scale_value": 1.0})

    return torch.ops.npu, "npu_fusion_attention_grad", unscaled


OF_MASKS = {
    "documents_forgotten": documents_forgotten,
    "key_gradients_of_another_sample": key_gradients_of_another_sample,
    "future_of_the_data": future_of_the_data,
    "mode_two": mode_two,
}
MUTANTS = OF_MASKS | {
    fault.__name__: fault
    for fault in (
        mode_two,
        no_mask,
        another_layout,
        statistics_swapped,
        window,
        scale_forgotten_in_the_backward,
    )
}


def noticed(name: str | None, case: Case) -> str:
    """In the worker: what the check says with a fault planted, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            owner, attribute, value = MUTANTS[name]()
            patch.setattr(owner, attribute, value)
        try:
            check(case)
        except (AssertionError, ValueError) as error:
            return repr(error)
    return ""


@pytest.mark.parametrize("name", OF_MASKS)
def test_a_fault_with_masks_is_noticed(npu, name: str) -> None:
    mask = "hidden and causal" if name == "future_of_the_data" else "documents"
    case = Case((4, 2), (5, 8, 1, 10), mask=mask)
    assert npu.run(noticed, None, case) == ""
    assert "off by" in npu.run(noticed, name, case)
    assert npu.run(noticed, None, case) == "", "the fault was left planted"


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(OF_MASKS) | {"mode_two"}))
def test_a_planted_fault_is_noticed(npu, name: str) -> None:
    case = Case((4, 2), (5, 4, 3))
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
    told = AttentionMask(**mask_arguments(mask, 8, batch))
    keys = told.keys(run)
    original, same = torch.ops.npu.npu_fusion_attention, []

    def watched(*args, **kwargs):
        same.extend(x.untyped_storage().data_ptr() == whole.data_ptr() for x in args[:3])
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.npu, "npu_fusion_attention", watched)
        kernels.attention_forward(whole[run], whole[keys], whole[keys], **told.keywords(run))
    return same


def test_chunks_of_a_contiguous_sequence_are_not_copied(npu) -> None:
    assert npu.run(chunks_are_not_copied, "causal", 2) == [True] * 3
    assert npu.run(chunks_are_not_copied, "documents", 1) == [True] * 3
