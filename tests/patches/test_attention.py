"""Attention that waits for its projection, and which calls it can: their kind and their mask."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_npu.ops.attention_mask import AttentionMask
from mindspeed_patches.attention import DeferredAttention
from mindspeed_patches.softmax_attention import AttentionCall

LENGTH, BATCH = 8, 2


class Attend:
    """An attention that counts how often it runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.q = torch.arange(24.0).view(3, 1, 2, 4).requires_grad_()

    def __call__(self) -> torch.Tensor:
        self.runs += 1
        return self.q.flatten(2) * 2

    def deferred(self, ranks: int = 1) -> DeferredAttention:
        mask, q = AttentionMask(True), self.q
        return DeferredAttention.of(q, q, q, mask=mask, scale=None, attend=self, ranks=ranks)


def test_its_shape_costs_nothing() -> None:
    attend = Attend()
    deferred = attend.deferred()
    assert tuple(deferred.shape) == (3, 1, 8)
    assert (deferred.size(0), deferred.dim(), deferred.ndim, deferred.numel()) == (3, 3, 3, 24)
    assert (deferred.dtype, deferred.device.type) == (torch.float32, "cpu")
    assert deferred.element_size() == 4
    assert "DeferredAttention" in repr(deferred)
    assert tuple(attend.deferred(ranks=3).shape) == (1, 1, 24)
    assert attend.runs == 0


USES = {
    "an operator": lambda x: x + 1,
    "an operator with it on the right": lambda x: 1 + x,
    "a function": lambda x: torch.nn.functional.linear(x, torch.ones(5, 8)),
    "a method": lambda x: x.reshape(3, -1),
    "a part": lambda x: x[1:],
    "in a list": lambda x: torch.cat([x, x]),
    "its values": lambda x: torch.tensor(x.tolist()),
    "in place": lambda x: torch.zeros(3, 1, 8).add_(x),
}


@pytest.mark.parametrize("use", sorted(USES))
def test_whoever_else_uses_it_gets_what_attention_returns(use: str) -> None:
    attend = Attend()
    found = USES[use](attend.deferred())
    assert attend.runs == 1
    assert type(found) is torch.Tensor
    assert torch.equal(found, USES[use](attend()))


def test_through_a_module_a_checkpoint_and_a_copy() -> None:
    attend, linear = Attend(), torch.nn.Linear(8, 5)

    def layer(q: torch.Tensor) -> Any:
        return linear(attend.deferred())

    checkpoint(layer, attend.q, use_reentrant=False).sum().backward()
    found, attend.q.grad = attend.q.grad, None
    linear(attend()).sum().backward()
    assert torch.equal(found, attend.q.grad)
    attend.q = attend.q.detach()
    assert torch.equal(copy.deepcopy(attend.deferred()), attend())


def call(of_data: Any = None, kind: str = "causal", **given: Any) -> AttentionCall:
    config = SimpleNamespace(attention_dropout=0.0, **given.pop("config", {}))
    owner = SimpleNamespace(config=config, attn_mask_type=kind)
    return AttentionCall.of(owner, True, (of_data,), given)


def packed(*ends: int) -> SimpleNamespace:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(ends))


RESET, GENERAL = {"reset_attention_mask": True}, {"attention_mask_type": "general"}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(), None),
        (call(kind="no_mask"), None),
        (call(kind="padding"), "its mask is padding; only causal and no_mask can be split by"),
        (call(attn_mask_type="arbitrary"), "its mask is arbitrary; only"),
        (call(packed_seq_params=packed(16), config=RESET), None),
        (call(packed_seq_params=packed(16)), "not those of --reset-attention-mask"),
        (
            call(packed_seq_params=packed(16), config=RESET, kind="no_mask"),
            "its mask is no_mask; documents are packed for causal attention",
        ),
        (call(attention_bias=object()), "an attention bias is added"),
        (call(config={"window_size": (4, 0)}), "a sliding window limits the keys"),
    ],
)
def test_calls_that_are_more_than_a_softmax(asked: AttentionCall, reason: str | None) -> None:
    found = asked.obstacle()
    assert found is None if reason is None else reason in str(found)


def test_dropout_counts_in_training() -> None:
    owner = SimpleNamespace(config=SimpleNamespace(attention_dropout=0.1), attn_mask_type="causal")
    found = [AttentionCall.of(owner, training).obstacle() for training in (True, False)]
    assert found == ["attention dropout is 0.1", None]


def tensors(*lengths: int, heads: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(length, 1, heads, 4) for length in lengths]


@pytest.mark.parametrize(
    ("qkv", "reason"),
    [
        (tensors(8, 8, 8), None),
        ([tensors(8, 8), *tensors(8, 8)], "queries and keys come in parts"),
        (tensors(8, 8, 4), "queries (8, 1, 2, 4) and keys (8, 1, 2, 4) are not of one sequence"),
        (tensors(8, 4, 4), "are not of one sequence"),
        ([x.flatten(2) for x in tensors(8, 8, 8)], "are not of one sequence"),
    ],
)
def test_queries_and_keys(qkv: list[Any], reason: str | None) -> None:
    found = call().tensor_obstacle(*qkv)
    assert found is None if reason is None else reason in str(found)


def test_documents_end_where_mindspeed_says() -> None:
    params = packed(3, 8, 16)
    mask = call(packed_seq_params=params, config=GENERAL).mask(LENGTH, BATCH)
    assert isinstance(mask, AttentionMask)
    assert (mask.causal, mask.hidden) == (True, None)
    assert mask.of(slice(4, 6))[0] == slice(0, 6)
    # All layers of a micro-batch, and their recomputation, have the same object.
    again = call(packed_seq_params=params).mask(LENGTH, BATCH)
    assert isinstance(again, AttentionMask)
    assert again.documents is mask.documents


HIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(packed_seq_params=packed(3, 11, 16)), "none ends at 8, with sample 0"),
        (call(packed_seq_params=packed(3, 8, 24)), "end 24 follows 8"),
        (
            call(packed_seq_params=SimpleNamespace(cu_seqlens_q=torch.ones(2, 3))),
            "multi-token prediction has ends",
        ),
        (call(config=GENERAL), "the mask of the data is not passed"),
        (
            call(HIDDEN[:4, :4], config=GENERAL),
            "the mask of the data is torch.bool (4, 4), not torch.bool (2, 1, 8, 8)",
        ),
        (call(HIDDEN.float(), config=GENERAL), "the mask of the data is torch.float32 (8, 8)"),
    ],
)
def test_masks_that_the_fused_form_cannot_take(asked: AttentionCall, reason: str) -> None:
    for _ in range(2):
        found = asked.mask(LENGTH, BATCH)
        assert isinstance(found, str)
        assert reason in found


@pytest.mark.parametrize("config", [GENERAL, {"tokenizer_padding_side": "left"}])
@pytest.mark.parametrize("shape", [(), (1, 1), (2, 1)])
def test_masks_of_the_data(config: dict[str, str], shape: tuple[int, ...]) -> None:
    asked = call(HIDDEN.expand(*shape, LENGTH, LENGTH), config=config)
    mask = asked.mask(LENGTH, BATCH)
    assert isinstance(mask, AttentionMask)
    assert mask.causal
    assert mask.hidden is not None
    assert mask.hidden.shape == (*(shape or (1, 1)), LENGTH, LENGTH)
    by_name = AttentionCall.of(SimpleNamespace(config=asked.config, attn_mask_type="causal"), True,
                               (), {"attention_mask": asked.of_data})  # fmt: skip
    assert by_name.of_data is asked.of_data


def test_padding_behind_a_sample_is_causal_and_no_more() -> None:
    config = {"attention_mask_type": "causal", "tokenizer_padding_side": "right"}
    expected = AttentionMask(True)
    assert call(HIDDEN, config=config).mask(LENGTH, BATCH) == expected
    assert call().mask(LENGTH, BATCH) == expected
    assert call(kind="no_mask", config=GENERAL).mask(LENGTH, BATCH) == AttentionMask(False)
