"""The queue of weight gradients that wait."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_npu.overlap.weight_gradients import WeightGradients
from commfuse_npu.plan.turn_rule import MOST_WEIGHT_GRADIENTS

WEIGHT = torch.nn.Parameter(torch.zeros(3, 2))


def test_first_in_first_out_and_few_wait() -> None:
    queue = WeightGradients()
    computed: list[int] = []
    for number in range(MOST_WEIGHT_GRADIENTS + 2):
        operands = torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.bfloat16)
        queue.add(WEIGHT, lambda *_, number=number: computed.append(number), operands)
    assert computed == [0, 1]
    assert queue.most_bytes == MOST_WEIGHT_GRADIENTS * (4 * 2 * 4 + 4 * 3 * 2)
    queue.compute_one()
    assert computed == [0, 1, 2]
    assert queue.deferred == MOST_WEIGHT_GRADIENTS + 2
    queue.compute_all()
    queue.compute_one()
    assert computed == list(range(MOST_WEIGHT_GRADIENTS + 2))
    assert len(queue) == 0


def test_older_gradients_are_computed_first() -> None:
    queue = WeightGradients()
    computed: list[int] = []
    other = torch.nn.Parameter(torch.zeros(3, 2))
    for number, weight in enumerate((other, WEIGHT, other)):
        queue.add(weight, lambda *_, number=number: computed.append(number), ())
    queue.compute_those_of(WEIGHT)
    assert computed == [0, 1]


def test_after_an_error_nothing_waits() -> None:
    queue = WeightGradients()
    queue.add(WEIGHT, partial(pytest.fail, "computed"), [torch.zeros(2)])
    queue.discard()
    queue.compute_all()
    queue.add(WEIGHT, lambda *_: None, [torch.zeros(3)])
    assert queue.most_bytes == 12


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda operand: operand[0].zero_(), "overwritten"),
        (lambda operand: operand.untyped_storage().resize_(0), "freed"),
    ],
)
def test_changed_operands_are_refused(change: object, what: str) -> None:
    queue = WeightGradients()
    operand = torch.ones(4, 2)
    queue.add(WEIGHT, partial(pytest.fail, "computed"), [torch.ones(4, 3), operand])
    queue.add(WEIGHT, partial(pytest.fail, "computed after an error"), ())
    change(operand)  # type: ignore[operator]
    message = rf"shape \(4, 2\) was {what} .* weight of shape \(3, 2\)"
    with pytest.raises(RuntimeError, match=message):
        queue.compute_one()
    queue.compute_all()


class Functions(TorchFunctionMode):
    def __torch_function__(self, *_: object) -> None:
        pytest.fail("in the mode of another pass")


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, *_: object) -> None:
        pytest.fail("in the mode of another pass")


def test_modes_of_another_pass_do_not_apply() -> None:
    queue = WeightGradients()
    x = torch.ones(2, 2, requires_grad=True)
    products: list[torch.Tensor] = []
    queue.add(WEIGHT, lambda *_: products.append(x @ x), [x])
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16), Functions(), Dispatches():
        queue.compute_one()
    assert products[0].dtype == torch.float32
    assert not products[0].requires_grad


def test_other_streams_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose streams are numbers."""
    device = SimpleNamespace(current_stream=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    queue = WeightGradients("cuda")
    assert queue.in_this_stream
    device.current_stream = lambda: 1
    assert not queue.in_this_stream
