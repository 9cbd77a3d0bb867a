"""The stand-in for MindSpeed's patch manager has the same semantics."""

import sys
from types import ModuleType
from typing import Any

import pytest

from mindspeed_patches import PatchManager

ADD = "patched_module.add"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``patched_module`` and two modules that import its function, now or later."""
    created: list[Any] = [ModuleType(name) for name in ("patched_module", "importing", "later")]
    created[0].add = created[1].add = lambda a, b: a + b
    for module in created:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return created


def times_ten_wrapper(fn):
    return lambda *args: 10 * fn(*args)


def plus_one_wrapper(fn):
    return lambda *args: 1 + fn(*args)


def test_what_is_registered_is_in_force_after_apply(modules) -> None:
    module, other, later = modules
    manager, before = PatchManager(), module.add
    for registered, (old, new) in (
        ((plus_one_wrapper,), (7, 8)),
        ((times_ten_wrapper, times_ten_wrapper), (8, 80)),  # the same once only
    ):
        for function in registered:
            manager.register_patch(ADD, function)
        assert module.add(5, 2) == old
        manager.apply_patches()
        assert module.add(5, 2) == other.add(5, 2) == new
        later.add = module.add  # imported while it is patched
    manager.remove_patches()
    assert module.add is other.add is later.add is before


def test_patches_that_take_turns_can_be_applied_again(modules) -> None:
    module, other, _ = modules
    managers = PatchManager(), PatchManager()
    for manager, wrapper in zip(managers, (plus_one_wrapper, times_ten_wrapper), strict=True):
        manager.register_patch(ADD, wrapper)
    for _ in range(2):
        for manager, patched in zip(managers, (8, 70), strict=True):
            with manager.applied():
                assert module.add(5, 2) == other.add(5, 2) == patched
            assert module.add(5, 2) == other.add(5, 2) == 7


def test_what_cannot_be_patched_is_named(modules) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.absent", plus_one_wrapper)
    with pytest.raises(AttributeError, match=r"has no attribute .absent."):
        manager.apply_patches()
