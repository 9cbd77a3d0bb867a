"""Which keys a query sees, from what Megatron and MindSpeed pass to a core attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu.ops.attention_mask import AttentionMask
from mindspeed_patches.softmax_attention import call_obstacle, mask_of_call

LENGTH, BATCH = 8, 2
PACKED = {"reset_attention_mask": True, "attention_dropout": 0.0}


def packed(*ends: int) -> SimpleNamespace:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(ends))


def found(given: dict[str, Any], of_data: Any = None, **config: Any) -> AttentionMask | str:
    return mask_of_call(SimpleNamespace(**config), "causal", given, of_data, LENGTH, BATCH)


def test_documents_end_where_mindspeed_says() -> None:
    params = packed(3, 8, 16)
    mask = found({"packed_seq_params": params}, attention_mask_type="general")
    assert isinstance(mask, AttentionMask)
    assert (mask.causal, mask.hidden) == (True, None)
    assert mask.keys(slice(4, 6)) == slice(0, 6)
    # All layers of a micro-batch, and their recomputation, have the same object.
    again = found({"packed_seq_params": params})
    assert isinstance(again, AttentionMask)
    assert again.documents is mask.documents


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (packed(3, 11, 16), "none ends at 8, with sample 0"),
        (packed(3, 8, 24), "end 24 follows 8"),
        (SimpleNamespace(cu_seqlens_q=torch.ones(2, 3)), "multi-token prediction has ends"),
    ],
)
def test_ends_that_the_fused_form_cannot_take(params: Any, reason: str) -> None:
    for _ in range(2):
        answer = found({"packed_seq_params": params})
        assert isinstance(answer, str)
        assert reason in answer


HIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "config", [{"attention_mask_type": "general"}, {"tokenizer_padding_side": "left"}]
)
@pytest.mark.parametrize("shape", [(), (1, 1), (2, 1)])
def test_masks_of_the_data(config: dict[str, str], shape: tuple[int, ...]) -> None:
    mask = found({}, HIDDEN.expand(*shape, LENGTH, LENGTH), **config)
    assert isinstance(mask, AttentionMask)
    assert mask.causal
    assert mask.hidden is not None
    assert mask.hidden.shape == (*(shape or (1, 1)), LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("of_data", "reason"),
    [
        (None, "the mask of the data is not passed"),
        (HIDDEN[:4, :4], r"the mask of the data is torch.bool (4, 4), not torch.bool (2, 1, 8, 8)"),
        (HIDDEN.float(), "the mask of the data is torch.float32 (8, 8)"),
    ],
)
def test_masks_of_the_data_that_do_not_fit(of_data: Any, reason: str) -> None:
    answer = found({}, of_data, attention_mask_type="general")
    assert isinstance(answer, str)
    assert reason in answer


def test_padding_behind_a_sample_is_causal_and_no_more() -> None:
    config = {"attention_mask_type": "causal", "tokenizer_padding_side": "right"}
    assert found({}, HIDDEN, **config) == found({}) == AttentionMask(True)


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (PACKED, "causal", None),
        (PACKED | {"reset_attention_mask": False}, "causal", "not those of --reset-attention-mask"),
        (PACKED, "no_mask", "its mask is no_mask; documents are packed for causal attention"),
    ],
)
def test_packed_sequences_of_others(config: dict[str, Any], kind: str, reason: str | None) -> None:
    given = {"packed_seq_params": packed(16)}
    answer = call_obstacle(SimpleNamespace(**config), True, kind, given)
    assert answer is None if reason is None else reason in str(answer)
