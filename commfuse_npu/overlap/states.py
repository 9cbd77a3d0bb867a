"""State outside the autograd graph that belongs to a pass."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Attributes", "PassState", "RandomState", "restore_states", "save_states"]

_MISSING = object()
"""Stands for the value of an attribute that is not there."""


class PassState(Protocol):
    """State of which each pass has its own values; they are swapped whenever the turn changes.

    A pass starts with the values that were current when it was created.
    """

    def save(self) -> dict[str, Any]:
        """The current values by name, for :meth:`restore`."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Set values that :meth:`save` returned, all or some of them."""

    def same(self, before: Any, after: Any) -> bool:
        """Whether a pass that started with the value ``before`` has not written it."""


def save_states(states: Sequence[PassState]) -> list[dict[str, Any]]:
    """The current values of each state."""
    return [state.save() for state in states]


def restore_states(states: Sequence[PassState], saved: Sequence[dict[str, Any]]) -> None:
    """Set what :func:`save_states` returned."""
    for state, values in zip(states, saved, strict=True):
        state.restore(values)


class RandomState(PassState):
    """torch's default generators, of the CPU and of the device.

    A recomputation sets them to the states of its forward, and then restores them.  If passes take
    turns, such changes do not nest, so each pass needs its own states.

    Args:
        device: ``npu``, ``cuda``, or ``cpu`` for the CPU's alone.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._modules = {"cpu": torch}
        if device != "cpu":
            self._modules[device] = torch.get_device_module(device)

    def save(self) -> dict[str, torch.Tensor]:
        return {name: module.get_rng_state() for name, module in self._modules.items()}

    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        for name, state in saved.items():
            self._modules[name].set_rng_state(state)

    def same(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        return torch.equal(before, after)


class Attributes(PassState):
    """Attributes of a module, a class or an object: those named, or all if none is named.

    A list, deque, dictionary or set stays the same object, as there may be other references to it;
    its contents are swapped.  A named attribute may be missing.  The owner is not kept alive, if it
    can be referred to weakly.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        self._names = names
        try:
            self._owner: Callable[[], Any] = weakref.ref(owner)
        except TypeError:
            self._owner = lambda: owner

    def save(self) -> dict[str, tuple[Any, Any]]:
        owner = self._owner()
        if owner is None:
            return {}
        values = vars(owner)
        if self._names:
            values = {name: getattr(owner, name, _MISSING) for name in self._names}
        return {
            name: (value, value.copy() if isinstance(value, (list, deque, dict, set)) else None)
            for name, value in values.items()
        }

    def restore(self, saved: dict[str, tuple[Any, Any]]) -> None:
        owner = self._owner()
        for name, (value, content) in saved.items():
            if value is _MISSING:
                if hasattr(owner, name):
                    delattr(owner, name)
                continue
            if content is not None:
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(content)
            if owner is not None:
                setattr(owner, name, value)

    def same(self, before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
        if before[0] is not after[0]:
            return False
        return _items(before[1]) == _items(after[1])


def _items(content: Iterable[Any] | None) -> list[tuple[Any, int]]:
    """The contents of a container, by identity."""
    if isinstance(content, dict):
        return [(key, id(value)) for key, value in content.items()]
    return [(None, id(value)) for value in content or ()]
