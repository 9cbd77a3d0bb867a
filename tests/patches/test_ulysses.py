"""When MindSpeed's own exchange of heads is kept, and the attributes that the wrappers read."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from mindspeed_patches.ulysses_wrappers import UlyssesWrappers
from mindspeed_patches.wrappers import LinearWrappers
from tests.patches.core_attentions import Core

GROUP = object()


def attention(mask: str = "causal", **exchange: Any) -> Any:
    """The attributes of MindSpeed's class that the wrapper reads; newer versions nest the core."""
    local = SimpleNamespace(core_attention=Core(mask))
    local.ulysses_comm_para = {"spg": GROUP} | exchange
    return SimpleNamespace(local_attn=local)


@pytest.mark.parametrize(
    ("attention", "beside", "keys", "reason"),
    [
        (attention("padding"), None, 8, "its mask is padding"),
        (attention(), None, 6, "queries and keys are not of one sequence"),
        (attention(), "another micro-batch", 8, "forward-backward overlap hides its transfers al"),
        (attention(spg=object()), None, 8, "over another group than the context-parallel one"),
        (attention(scatter_idx=1), None, 8, "it exchanges other dimensions than heads and seq"),
        (attention(gather_idx=1), None, 8, "it exchanges other dimensions than heads and sequen"),
        (attention(gather_size_calculator=object()), None, 8, "object may gather another number"),
    ],
)
def test_obstacles_by_their_reason(attention, beside, keys, reason, caplog, monkeypatch) -> None:
    monkeypatch.setattr(
        "mindspeed_patches.ulysses_wrappers.active_turns", lambda: beside and Mock(alone=False)
    )
    linears = LinearWrappers()
    ulysses: Any = UlyssesWrappers(linears)
    ulysses.transport = SimpleNamespace(size=2, group=GROUP)
    forward, own = ulysses.ulysses_forward_wrapper, Mock(__name__="forward")
    qkv = torch.zeros(8, 1, 4, 4), *[torch.zeros(keys, 1, 2, 4)] * 2
    called = (attention, *qkv, torch.zeros(1, 1, 15, 15))
    for _ in range(2):
        forward(own)(*called, attention_bias=None)
    assert own.mock_calls == [call(*called, attention_bias=None)] * 2
    (((name, path), count),) = linears.calls.items()
    assert (name, count) == ("ulysses", 2)
    assert reason in path
    assert len(caplog.records) == (not beside)  # logged once, a pair's never
