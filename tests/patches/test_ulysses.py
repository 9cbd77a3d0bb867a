"""When MindSpeed's own exchange of heads is kept, and the attributes that the wrappers read."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from mindspeed_patches.ulysses import UlyssesWrappers, innermost, scale_of
from mindspeed_patches.wrappers import LinearWrappers


def attention(mask: str = "causal") -> Any:
    """The attributes of MindSpeed's class that the wrapper reads; newer versions nest the core."""
    config = SimpleNamespace(attention_dropout=0.0)
    core = SimpleNamespace(config=config, attn_mask_type=mask, training=True)
    return SimpleNamespace(local_attn=SimpleNamespace(core_attention=core, config=config))


@pytest.mark.parametrize(
    ("mask", "beside", "keys", "reason"),
    [
        ("padding", None, 8, "its mask is padding"),
        ("causal", None, 6, "queries (8, 1, 4, 4) and keys (6, 1, 2, 4) are not of one sequence"),
        ("causal", "another micro-batch", 8, "forward-backward overlap hides its transfers alrea"),
    ],
)
def test_obstacles_by_their_reason(mask, beside, keys, reason, caplog, monkeypatch) -> None:
    monkeypatch.setattr("mindspeed_patches.ulysses.active_turns", lambda: beside)
    linears = LinearWrappers()
    ulysses: Any = UlyssesWrappers(linears)
    ulysses.transport = SimpleNamespace(size=2)
    forward, own = ulysses.ulysses_forward_wrapper, Mock(__name__="forward")
    qkv = torch.zeros(8, 1, 4, 4), *[torch.zeros(keys, 1, 2, 4)] * 2
    called = (attention(mask), *qkv, torch.zeros(1, 1, 15, 15))
    for _ in range(2):
        forward(own)(*called, attention_bias=None)
    assert own.mock_calls == [call(*called, attention_bias=None)] * 2
    (((name, path), count),) = linears.calls.items()
    assert (name, count) == ("ulysses", 2)
    assert reason in path
    assert len(caplog.records) == (not beside)  # logged once, a pair's never


@pytest.mark.parametrize(
    ("own", "config", "expected"),
    [(0.3, {"softmax_scale": 0.2}, 0.3), (None, {"softmax_scale": 0.2}, 0.2), (None, {}, None)],
)
def test_the_scale_is_that_of_local_attention(own: Any, config: Any, expected: Any) -> None:
    core = innermost(attention().local_attn)
    vars(core.config).update(config)
    if own is not None:
        core.scale = own
    assert scale_of(core) == expected
