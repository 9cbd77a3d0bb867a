"""States of passes: attributes that are missing or deleted, owners that are freed; slots."""

import gc
import weakref

import torch

from commfuse_npu.overlap import Attributes
from commfuse_npu.overlap.states import RandomState
from commfuse_npu.overlap.turns import Turns
from commfuse_npu.overlap.weight_gradients import WeightGradients


class Owner:
    kept: object


def test_a_missing_attribute_is_restored_as_missing() -> None:
    owner = Owner()
    state = Attributes(owner, "kept")
    without = state.save()
    owner.kept = [1]
    with_value = state.save()
    state.restore(without)
    assert not hasattr(owner, "kept")
    state.restore(with_value)
    assert owner.kept == [1]
    del owner.kept
    assert state.same(without["kept"], state.save()["kept"])


def test_states_do_not_keep_their_owner_alive() -> None:
    layer = torch.nn.Identity()
    state = Attributes(layer, "training")
    saved = state.save()
    freed = weakref.ref(layer)
    del layer
    gc.collect()
    assert freed() is None
    assert state.save() == {}
    state.restore(saved)


def test_passes_that_have_not_ended_have_different_slots() -> None:
    turns = Turns([RandomState()], "cpu", WeightGradients())
    seen: list[int] = []

    def inner() -> None:
        seen.append(turns.running.slot)

    def outer() -> None:
        seen.append(turns.running.slot)
        turns.join(turns.fork(inner))

    def backward() -> None:
        seen.append(turns.running.slot)
        turns.join(turns.fork(outer))
        turns.join(turns.fork(inner))

    turns.run({"backward": backward})
    assert seen == [0, 1, 2, 1]
