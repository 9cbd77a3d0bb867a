"""When MindSpeed's own exchange of heads is kept, and the attributes that the wrappers read."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mindspeed_patches.ulysses import UlyssesWrappers, innermost, scale_of
from mindspeed_patches.wrappers import LinearWrappers

GROUP = object()


def attention(mask: str = "causal", nested: bool = False, **exchange: Any) -> Any:
    """The attributes of MindSpeed's class that the wrapper reads; the core may be nested."""
    exchange = {"spg": GROUP} | exchange
    config = SimpleNamespace(attention_dropout=0.0)
    core = SimpleNamespace(config=config, attn_mask_type=mask, ulysses_comm_para=exchange)
    if nested:
        core = SimpleNamespace(core_attention=core, config=config, ulysses_comm_para=exchange)
    return SimpleNamespace(local_attn=core, training=True)


QKV = [torch.zeros(8, 1, heads, 4) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    ("attention", "tensors", "reason"),
    [
        (attention("padding", nested=True), QKV, "its mask is padding"),
        (attention(), [QKV, *QKV[1:]], "queries or keys are not one tensor"),
        (attention(beside=True), QKV, "forward-backward overlap hides its transfers already"),
        (attention(spg=object()), QKV, "over another group than the context-pa"),
        (attention(scatter_idx=1), QKV, "it exchanges other dimensions than heads and sequence"),
        (attention(gather_idx=1), QKV, "it exchanges other dimensions than heads and sequence"),
        (attention(gather_size_calculator=object()), QKV, "object may gather another number of r"),
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
def test_documents_are_of_the_rows_that_attention_gets(
    monkeypatch, sequence_parallel, rows
) -> None:
    """Also beside tensor parallelism, where each rank of the layer has a part of them."""
    ulysses: Any = UlyssesWrappers(LinearWrappers())
    ulysses.transport = SimpleNamespace(size=2, group=GROUP)
    mask_of = Mock(return_value="left")
    monkeypatch.setattr("mindspeed_patches.ulysses.mask_of", mask_of)
    config = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    layer = SimpleNamespace(
        core_attention=attention(), linear_qkv=None, config=config, attn_mask_type="causal"
    )
    forward = ulysses.attention_forward_wrapper(lambda layer, x, mask: x)
    forward(layer, torch.zeros(4, 3, 8), None)
    assert mask_of.call_args.args[-2:] == (2 * rows, 3)


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
