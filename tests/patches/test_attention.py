"""Attention that is deferred until its projection, and the calls and masks that it supports."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_patches.self_attention import (
    DeferredAttention,
    attention_arguments,
    heads_obstacle,
)
from tests.patches.core_attentions import Core

LENGTH, BATCH = 8, 2
USES = [
    lambda x: x + 1,
    lambda x: 1 + x,
    lambda x: torch.nn.functional.linear(x, torch.ones(5, 8)),
    lambda x: x.reshape(3, -1),
    lambda x: torch.cat([x, x]),
    lambda x: torch.tensor(x.tolist()),
    lambda x: torch.zeros(3, 1, 8).add_(x),
    copy.deepcopy,
]


@pytest.mark.parametrize("use", USES)
def test_who_uses_it_gets_what_attention_returns(use: Any) -> None:
    runs, q = [], torch.arange(24.0).view(3, 1, 2, 4)

    def attend() -> torch.Tensor:
        runs.append(0)
        return q.flatten(2) * 2

    deferred = DeferredAttention.of(q, q, q, arguments={}, attend=attend)
    facts = tuple(deferred.shape), deferred.size(0), deferred.dim(), deferred.numel()
    assert facts == ((3, 1, 8), 3, 3, 24)
    assert (deferred.dtype, deferred.element_size()) == (torch.float32, 4)
    exchanged = DeferredAttention.of(q, q, q, arguments={}, attend=attend, ranks=3)
    assert tuple(exchanged.shape) == (1, 1, 24)
    assert runs == [], "its shape costs nothing"
    result = use(deferred)
    assert (runs, type(result)) == ([0], torch.Tensor)
    assert torch.equal(result, use(attend()))


def test_a_first_use_without_gradients_keeps_those_of_others() -> None:
    q = torch.ones(3, 1, 2, 4, requires_grad=True)
    with torch.no_grad():  # as in a checkpoint
        deferred = DeferredAttention.of(q, q, q, arguments={}, attend=lambda: q.flatten(2) * 2)
        assert deferred.norm() > 0  # as a debugger looks at activations
    (deferred + 1).sum().backward()
    assert torch.equal(q.grad, torch.full_like(q, 2))


def call(kind: str = "causal", **given: Any) -> Any:
    """The arguments of the op for a call, or the reason why it is not fused."""
    core = Core(kind, **given.pop("config", {}))
    return attention_arguments(core, (None,), given, LENGTH, BATCH)


def packed(*ends: int) -> SimpleNamespace:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(ends))


def heads(*lengths: int) -> list[torch.Tensor]:
    return [torch.zeros(length, BATCH, 2, 4) for length in lengths]


QKV = heads(LENGTH, LENGTH, LENGTH)
RESET, GENERAL = {"reset_attention_mask": True}, {"attention_mask_type": "general"}
PACKED = {"config": RESET, "packed_seq_params": packed(16)}
BAD_ENDS = PACKED | {"packed_seq_params": packed(3, 11, 16)}
OF_DEPTHS = PACKED | {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.ones(2, 3))}


@pytest.mark.parametrize(
    ("asked", "qkv", "reason"),
    [
        (call(kind="padding"), QKV, "its mask is padding; only causal and no_mask can be split by"),
        (call(attn_mask_type="arbitrary"), QKV, "its mask is arbitrary; only"),
        (call(packed_seq_params=packed(16)), QKV, "not those of --reset-attention-mask"),
        (call(kind="no_mask", **PACKED), QKV, "its mask is no_mask; documents are packed for cau"),
        (call(attention_bias=object()), QKV, "its call passes attention_bias, which"),
        (call(topk_indices=object()), QKV, "its call passes topk_indices, which"),
        (call(config={"dropout": 0.1}), QKV, "attention dropout is 0.1"),
        (call(config={"window_size": (4, 0)}), QKV, "a sliding window limits the keys"),
        (call(), heads(8, 8, 4), "queries and keys are not of one sequence"),
        (call(), heads(8, 4, 4), "are not of one sequence"),
        (call(), [x.flatten(2) for x in QKV], "are not of one sequence"),
        (call(**BAD_ENDS), QKV, "a document continues in the next sample"),
        (call(**OF_DEPTHS), QKV, "multi-token prediction has ends"),
        (call(config=GENERAL), QKV, "its mask is that of the data (--attention-mask-type"),
        (call(config={"tokenizer_padding_side": "left"}), QKV, "its mask is that of the data"),
    ],
)
def test_calls_that_the_fused_form_cannot_take(asked: Any, qkv: list[Any], reason: str) -> None:
    obstacle = heads_obstacle(*qkv) or asked
    assert isinstance(obstacle, str)
    assert reason in obstacle


def test_reasons_are_the_same_for_all_lengths() -> None:
    """Decoding and packed data have other lengths in each call: each reason is logged once."""
    assert heads_obstacle(*heads(1, 7, 7)) == heads_obstacle(*heads(3, 11, 11))
    other_ends = PACKED | {"packed_seq_params": packed(1, 12, 16)}
    assert call(**BAD_ENDS) == call(**other_ends)


def test_masks_that_their_kind_says() -> None:
    assert heads_obstacle(*QKV) is None
    assert call() == {"causal": True, "scale": 0.25}
    assert call(kind="no_mask", config=GENERAL) == {"causal": False, "scale": 0.25}


def test_documents_end_where_mindspeed_says() -> None:
    params = packed(3, 8, 16)
    mask = call(packed_seq_params=params, config=GENERAL | RESET)
    assert mask["causal"]
    assert mask["documents"].pieces(slice(4, 6))[0] == slice(0, 6)
    # All layers of a micro-batch, and their recomputation, have the same object.
    again = call(packed_seq_params=params, config=RESET)
    assert again["documents"] is mask["documents"]
