"""What forward and backward both write is found, and gather buffers are of one side."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.overlap import ForwardBackwardOverlap
from mindspeed_patches.fb_overlap.census import Census
from mindspeed_patches.fb_overlap.side_states import scratch_of_each_side, side_states

LENGTHS = "mindspeed_llm.lengths_of_a_test"


class Layer(torch.nn.Module):
    """Keeps something of a micro-batch, as a dispatcher of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self.calls = 0


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def found(rank: int) -> list[str]:
    module: Any = ModuleType(LENGTHS)
    module.lengths, module.of_forwards, module.table = None, None, [0]
    sys.modules[LENGTHS] = module
    layer = Layer()

    def forward() -> None:
        module.lengths, module.of_forwards = [1, 2], "forward"
        dist.all_reduce(torch.ones(1))
        layer.kept = torch.ones(1)
        module.table.append(1)

    def backward() -> None:
        module.lengths = [3, 4]
        layer.kept = torch.zeros(1)
        dist.all_reduce(torch.ones(1))
        module.table.append(2)

    try:
        # Both chunks of a virtual pipeline have a layer of this name.
        models = [torch.nn.Sequential(layer), torch.nn.Sequential(Layer())]
        census = Census(ForwardBackwardOverlap([world()]), models)
        census.run(forward, backward, None)
    finally:
        del sys.modules[LENGTHS]
    return census.unknown


def test_what_both_sides_write_is_found(ranks: Any) -> None:
    expected = ["chunk 0, 0: Layer.kept", f"{LENGTHS}.lengths", f"{LENGTHS}.table"]
    assert ranks(2).run(found) == [expected, expected]


class Held:
    """What a dispatcher of experts keeps of a micro-batch."""

    def __init__(self, **parts: Held) -> None:
        self.counts: Any = None
        vars(self).update(parts)


Held.__module__ = LENGTHS


def of_experts(rank: int) -> list[str]:
    """The dispatcher and its ``disaptor``, the mask and a checkpoint are, other parts are not."""
    checkpoint = type("CheckpointWithoutOutput", (), {})
    layer = Layer()
    one: Any = Held(disaptor=Held(), part=Held())
    layer.token_dispatcher, layer.router, layer.attention_mask = one, Held(), None
    model = torch.nn.Sequential(layer)

    def side() -> None:
        for owner in (one, one.disaptor, one.part, layer.router):
            owner.counts = torch.ones(1)
        layer.attention_mask, layer.kept = torch.ones(1), checkpoint()
        dist.all_reduce(torch.ones(1))

    overlap = ForwardBackwardOverlap([world()])
    census = Census(overlap, [model])
    census.run(side, side, None)
    unknown, kept = census.unknown, []
    overlap.states = side_states([model], "cpu")

    def alone(value: int) -> None:
        one.counts = one.disaptor.counts = layer.attention_mask = layer.kept = value
        dist.all_reduce(torch.ones(1))
        kept.append((one.counts, one.disaptor.counts, layer.attention_mask, layer.kept))

    overlap.run(partial(alone, 1), partial(alone, 2))
    assert sorted(kept) == [(1,) * 4, (2,) * 4]
    return unknown


def test_what_experts_and_attention_keep_is_of_one_side(ranks: Any) -> None:
    owner = "chunk 0, 0: Layer"
    expected = [f"{owner}.router.counts", f"{owner}.token_dispatcher.part.counts"]
    assert ranks(2).run(of_experts) == [expected, expected]


class Recomputed(torch.autograd.Function):
    """``tanh``, as MindSpeed recomputes activations: a hook runs it again, backward reads grads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.detach().requires_grad_())
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            torch.tanh(*ctx.saved_tensors).backward(grad)
        return ctx.saved_tensors[0].grad


def activations(rank: int) -> int:
    census = Census(ForwardBackwardOverlap([world()]), [layer := torch.nn.Linear(8, 8)])
    x = torch.randn(4, 8, requires_grad=True)
    output, _ = census.run(lambda: [Recomputed.apply(layer(x))], lambda: None, None)
    output[0].sum().backward()
    expected = torch.autograd.grad(torch.tanh(layer(x)).sum(), x)
    assert torch.equal(x.grad if x.grad is not None else torch.zeros(1), *expected)
    return census.kept


def test_activations_are_weighed_without_parameters(ranks: Any) -> None:
    """Of ``tanh(x W^T + b)`` its input and what ``tanh`` is of; and its gradient is not lost."""
    assert ranks(2).run(activations) == [2 * 4 * 8 * 4] * 2


def swapped_activations(rank: int) -> tuple[int, int, bool]:
    census = Census(ForwardBackwardOverlap([world()]), [layer := torch.nn.Linear(8, 8)])
    host: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        host.append(tensor.clone())
        return len(host) - 1

    def forward() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, given_back.__getitem__):
            hidden = torch.tanh(layer(x))
        return hidden * hidden.detach()

    given_back = mock.MagicMock(wraps=host)
    given_back.__getitem__.side_effect = host.__getitem__
    x = torch.randn(4, 8, requires_grad=True)
    output, _ = census.run(forward, lambda: None, None)
    called = given_back.__getitem__.call_count
    output.sum().backward()
    hidden = torch.tanh(layer(x))
    expected = torch.autograd.grad((hidden * hidden.detach()).sum(), x)
    return called, census.kept, x.grad is not None and torch.equal(x.grad, *expected)


def test_hooks_of_saved_tensors_are_not_called_to_weigh_them(ranks: Any) -> None:
    """MindSpeed's hooks of ``--swap-attention`` lose count; what they hold is not weighed."""
    assert ranks(2).run(swapped_activations) == [(0, 4 * 8 * 4, True)] * 2


class Marked(torch.autograd.Function):
    """Its backward writes into what hangs on its weight, as Megatron's fused accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad += (grad * x).sum(0)
        return grad * weight, None


def accumulated(rank: int) -> list[float]:
    census = Census(ForwardBackwardOverlap([world()]), [layer := torch.nn.Linear(8, 8)])
    layer.bias.main_grad = torch.zeros(8)  # type: ignore[assignment]
    x = torch.ones(4, 8, requires_grad=True)
    output, _ = census.run(lambda: Marked.apply(layer(x), layer.bias), lambda: None, None)
    output.sum().backward()
    return layer.bias.main_grad.tolist()  # type: ignore[operator]


def test_a_parameter_is_itself_in_the_backward(ranks: Any) -> None:
    assert all(map(any, ranks(2).run(accumulated)))


def scratch(rank: int) -> None:
    from megatron.core.utils import GlobalMemoryBuffer

    scratch_of_each_side()
    overlap = ForwardBackwardOverlap([world()])
    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        buffer = GlobalMemoryBuffer()

        def place() -> int:
            return int(buffer.get_tensor([4], torch.float32, "mpu").data_ptr())

        forward, backward = overlap.run(place, place)
        assert forward != backward
        assert place() == forward


def test_named_random_states_are_of_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """In core 0.16 with the name of the one in force."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    forward = {"one": torch.zeros(1)}
    monkeypatch.setattr(tracker, "states_", dict(forward))
    monkeypatch.setattr(tracker, "_current_state_name", "of the forward", raising=False)
    state = side_states([], "cpu")[1]
    saved = state.save()
    tracker.states_["one"], tracker._current_state_name = torch.ones(1), "of the backward"
    state.restore(saved)
    assert tracker.states_ == forward
    assert tracker._current_state_name == "of the forward"


def test_gather_buffers_are_of_one_side(ranks: Any) -> None:
    ranks(2).run(scratch)
