"""When MindSpeed's own exchange of heads is kept, and the attributes that the wrappers read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mindspeed_patches.ulysses import UlyssesWrappers, innermost, scale_of
from mindspeed_patches.wrappers import LinearWrappers

GROUP = object()
UNEVEN = SimpleNamespace(calculate=lambda mask, **_: mask.shape[-1])


def attention(mask: str = "causal", nested: bool = False, **exchange: Any) -> Any:
    """The attributes of MindSpeed's class that the wrapper reads; the core may be nested."""
    exchange = {"spg": GROUP, "scatter_idx": 2, "gather_idx": 0} | exchange
    config = SimpleNamespace(attention_dropout=0.0)
    core = SimpleNamespace(config=config, attn_mask_type=mask, ulysses_comm_para=exchange)
    if nested:
        core = SimpleNamespace(core_attention=core, config=config, ulysses_comm_para=exchange)
    return SimpleNamespace(local_attn=core, training=True)


def qkv(heads: int = 4, key_heads: int = 2, length: int = 8) -> list[torch.Tensor]:
    return [torch.zeros(length, 1, n, 4) for n in (heads, key_heads, key_heads)]


@pytest.mark.parametrize(
    ("attention", "tensors", "reason"),
    [
        (attention("padding"), qkv(), "its mask is padding; only causal and no_mask can be"),
        (attention("padding", nested=True), qkv(), "its mask is padding"),
        (attention(), [qkv(), *qkv()[1:]], "queries or keys are not one tensor"),
        (attention(beside=True), qkv(), "forward-backward overlap hides its transfers already"),
        (attention(spg=object()), qkv(), "over another group than the context-pa"),
        (attention(scatter_idx=1), qkv(), "it exchanges other dimensions than heads"),
        (attention(gather_size_calculator=UNEVEN), qkv(), "a sequence of 15 is not 2 times 8"),
        (attention(), qkv(3, 3), "3 query heads and 3 key heads cannot be shared out evenly"),
        (attention(), qkv(4, 3), "4 query heads and 3 key heads cannot be shared out evenly"),
    ],
)
def test_obstacles_by_their_reason(
    attention: Any,
    tensors: list[Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = attention.local_attn.ulysses_comm_para.get("beside")
    monkeypatch.setattr("mindspeed_patches.ulysses.active_turns", lambda: beside)
    linears = LinearWrappers()
    ulysses = UlyssesWrappers(linears)
    ulysses.transport = SimpleNamespace(size=2, group=GROUP)  # type: ignore[assignment]
    calls = []
    forward = ulysses.ulysses_forward_wrapper(lambda *args, **kwargs: calls.append((args, kwargs)))
    mask = torch.zeros(1, 1, 15, 15)
    for _ in range(2):
        forward(attention, *tensors, mask, attention_bias=None)
    assert calls == [((attention, *tensors, mask), {"attention_bias": None})] * 2
    (((name, path), count),) = linears.calls.items()
    assert (name, count) == ("ulysses", 2)
    assert reason in path
    assert len(caplog.records) == (not beside)  # logged once, a pair's never


@pytest.mark.parametrize(("sequence_parallel", "rows"), [(True, 8), (False, 4)])
def test_documents_are_of_the_rows_that_attention_gets(sequence_parallel, rows) -> None:
    """Also beside tensor parallelism, where each rank of the layer has a part of them."""
    ulysses: Any = UlyssesWrappers(LinearWrappers())
    ulysses._mask = Mock(return_value="left")
    config = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    heads = dict.fromkeys(("num_attention_heads_per_partition", "num_query_groups_per_partition"))
    layer = SimpleNamespace(
        core_attention=attention(), linear_qkv=None, config=config, attn_mask_type="causal", **heads
    )
    forward = ulysses.attention_forward_wrapper(lambda layer, x, mask: x)
    forward(layer, torch.zeros(4, 3, 8), None)
    assert ulysses._mask.call_args.args[2][:2] == (rows, 3)


@pytest.mark.parametrize(
    ("own", "config", "expected"),
    [(0.3, {"softmax_scale": 0.2}, 0.3), (None, {"softmax_scale": 0.2}, 0.2), (None, {}, None)],
)
def test_the_scale_is_that_of_local_attention(own: Any, config: Any, expected: Any) -> None:
    core = innermost(attention(nested=True).local_attn)
    vars(core.config).update(config)
    if own is not None:
        core.scale = own
    assert scale_of(core) == expected
