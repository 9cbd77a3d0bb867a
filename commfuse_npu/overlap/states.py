"""State outside the autograd graph that belongs to one of the two sides."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Attributes", "RandomState", "SideState"]


class SideState(Protocol):
    """State of which each side has its own value; swapped whenever the turn changes."""

    def save(self) -> Any:
        """The current value, for :meth:`restore`."""

    def restore(self, saved: Any) -> None:
        """Set the value that :meth:`save` returned."""


class RandomState(SideState):
    """torch's default generators, of the CPU and of the device.

    A recomputation sets them to the states of its forward, and then restores them.  If two sides
    take turns, such changes do not nest, so each side needs its own states.

    Args:
        device: ``npu``, ``cuda``, or ``cpu`` for the CPU's alone.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._modules = [torch] if device == "cpu" else [torch, torch.get_device_module(device)]

    def save(self) -> list[torch.Tensor]:
        return [module.get_rng_state() for module in self._modules]

    def restore(self, saved: list[torch.Tensor]) -> None:
        for module, state in zip(self._modules, saved, strict=True):
            module.set_rng_state(state)


class Attributes(SideState):
    """Attributes of a module, a class or an object: those named, or all if none is named.

    A list or dictionary stays the same object, as there may be other references to it; its contents
    are swapped.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        self._owner, self._names = owner, names

    def save(self) -> dict[str, tuple[Any, Any]]:
        values = vars(self._owner)
        if self._names:
            values = {name: getattr(self._owner, name) for name in self._names}
        return {
            name: (value, value.copy() if isinstance(value, (list, dict)) else None)
            for name, value in values.items()
        }

    def restore(self, saved: dict[str, tuple[Any, Any]]) -> None:
        if not self._names:
            vars(self._owner).clear()
        for name, (value, content) in saved.items():
            if content is not None:
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(content)
            setattr(self._owner, name, value)
