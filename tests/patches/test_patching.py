"""The stand-in for MindSpeed's patch manager keeps that one's semantics."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from mindspeed_patches import PatchManager

ADD = "patched_module.add"


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """``patched_module`` with a function and a class, and another module that imported both."""
    module = types.ModuleType("patched_module")

    class Layer:
        def forward(self, x):
            return x

    module.add, module.Layer = (lambda a, b: a + b), Layer
    other = types.ModuleType("importing_module")
    other.add = module.add
    sys.modules["patched_module"], sys.modules["importing_module"] = module, other
    yield module
    for name in ("patched_module", "importing_module", "later_module"):
        sys.modules.pop(name, None)


def times_ten_wrapper(fn):
    return lambda *args: 10 * fn(*args)


def plus_one_wrapper(fn):
    return lambda *args: 1 + fn(*args)


def subtract(a, b):
    return a - b


@pytest.mark.parametrize(
    ("registered", "result"),
    [
        ([times_ten_wrapper], 70),
        ([plus_one_wrapper, times_ten_wrapper, times_ten_wrapper], 80),  # the same once only
        ([times_ten_wrapper, subtract], 30),
        ([subtract], 3),
    ],
)
def test_what_is_registered_is_in_force_after_apply(module, registered, result: int) -> None:
    manager, before, other = PatchManager(), module.add, sys.modules["importing_module"]
    for function in registered:
        manager.register_patch(ADD, function)
    assert module.add is before
    for _ in range(2):
        manager.apply_patches()
    assert module.add(5, 2) == other.add(5, 2) == result
    manager.remove_patches()
    assert module.add is other.add is before


def test_wrappers_may_come_after_a_first_apply_and_modules_too(module) -> None:
    manager, before = PatchManager(), module.add
    manager.register_patch(ADD, plus_one_wrapper)
    manager.apply_patches()
    later = sys.modules["later_module"] = types.ModuleType("later_module")
    later.add = module.add
    manager.register_patch(ADD, times_ten_wrapper)
    assert module.add(1, 2) == 4
    manager.apply_patches()
    assert module.add(1, 2) == later.add(1, 2) == 40
    manager.remove_patches()
    assert later.add is before


def test_methods(module) -> None:
    def forward_wrapper(fn):
        return lambda self, x: [fn(self, x)]

    class Subclass(module.Layer):
        pass

    module.Subclass, manager = Subclass, PatchManager()
    manager.register_patch("patched_module.Subclass.forward", forward_wrapper)
    manager.apply_patches()
    assert (Subclass().forward(1), module.Layer().forward(1)) == ([1], 1)
    manager.remove_patches()
    assert Subclass().forward(1) == 1
    assert "forward" not in vars(Subclass)


def test_a_second_replacement_is_refused(module) -> None:
    manager = PatchManager()
    manager.register_patch(ADD, subtract)
    with pytest.raises(RuntimeError, match=r"patched_module.add is replaced already; wrap it"):
        manager.register_patch(ADD, lambda a, b: 0)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("patched_module.absent", AttributeError, "has no attribute .absent."),
        ("no_such_package.function", ModuleNotFoundError, "no_such_package"),
    ],
)
def test_what_is_missing_is_named(module, path: str, error, message: str) -> None:
    manager = PatchManager()
    manager.register_patch(path, subtract)
    with pytest.raises(error, match=message):
        manager.apply_patches()
