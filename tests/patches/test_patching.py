"""The stand-in for MindSpeed's patch manager keeps that one's semantics."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from mindspeed_patches import PatchManager


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
    for name in ("patched_module", "importing_module"):
        sys.modules.pop(name)


def times_ten_wrapper(fn):
    return lambda *args: 10 * fn(*args)


def plus_one_wrapper(fn):
    return lambda *args: 1 + fn(*args)


def subtract(a, b):
    return a - b


def test_nothing_happens_before_apply(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.add", times_ten_wrapper)
    assert module.add(1, 2) == 3
    manager.apply_patches()
    assert module.add(1, 2) == 30


def test_wrappers_stack_in_the_order_of_registration(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.add", plus_one_wrapper)
    manager.register_patch("patched_module.add", times_ten_wrapper)
    manager.register_patch("patched_module.add", times_ten_wrapper)  # the same once only
    manager.apply_patches()
    manager.apply_patches()
    assert module.add(1, 2) == 40


def test_a_wrapper_of_a_replacement(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.add", times_ten_wrapper)
    manager.register_patch("patched_module.add", subtract)
    manager.apply_patches()
    assert module.add(5, 2) == 30


def test_wrappers_may_come_after_a_first_apply(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.add", plus_one_wrapper)
    manager.apply_patches()
    manager.register_patch("patched_module.add", times_ten_wrapper)
    manager.apply_patches()
    assert module.add(1, 2) == 40


def test_a_second_replacement_is_refused(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.add", subtract)
    with pytest.raises(RuntimeError, match=r"patched_module.add is replaced already; wrap it"):
        manager.register_patch("patched_module.add", lambda a, b: 0)


def test_what_other_modules_imported_is_rebound(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.add", subtract)
    manager.apply_patches()
    assert sys.modules["importing_module"].add(5, 2) == 3


def test_methods(module) -> None:
    manager = PatchManager()

    def forward_wrapper(fn):
        return lambda self, x: [fn(self, x)]

    manager.register_patch("patched_module.Layer.forward", forward_wrapper)
    layer = module.Layer()
    manager.apply_patches()
    assert layer.forward(1) == [1]
    manager.remove_patches()
    assert layer.forward(1) == 1


def test_removing_puts_everything_back(module) -> None:
    before, held = module.add, sys.modules["importing_module"].add
    manager = PatchManager()
    manager.register_patch("patched_module.add", times_ten_wrapper)
    manager.apply_patches()
    manager.remove_patches()
    assert module.add is before
    assert sys.modules["importing_module"].add is held


def test_a_patch_stays_in_force_until_the_next_apply(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.add", plus_one_wrapper)
    manager.apply_patches()
    manager.register_patch("patched_module.add", times_ten_wrapper)
    assert module.add(1, 2) == 4
    manager.apply_patches()
    assert module.add(1, 2) == 40


def test_modules_that_import_a_patched_function_later_follow_too(module) -> None:
    before = module.add
    manager = PatchManager()
    manager.register_patch("patched_module.add", plus_one_wrapper)
    manager.apply_patches()
    later = types.ModuleType("later_module")
    later.add = module.add
    sys.modules["later_module"] = later
    try:
        manager.register_patch("patched_module.add", times_ten_wrapper)
        manager.apply_patches()
        assert later.add(1, 2) == 40
        manager.remove_patches()
        assert later.add is before
    finally:
        sys.modules.pop("later_module")


def test_what_is_missing_is_named(module) -> None:
    manager = PatchManager()
    manager.register_patch("patched_module.absent", subtract)
    with pytest.raises(AttributeError, match="patched_module has no absent; it cannot be patched"):
        manager.apply_patches()
    manager = PatchManager()
    manager.register_patch("no_such_package.function", subtract)
    with pytest.raises(ModuleNotFoundError):
        manager.apply_patches()
