"""Finds state outside the autograd graph that forward and backward both write.

The first step runs in Megatron's order.  At each transfer at which a pair could hand over, module
globals and attributes are compared with their previous values.  If a forward and a backward both
wrote a name that is neither swapped (:mod:`.side_states`) nor harmless, the overlap is refused: one
side would read what the other one wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from commfuse_npu.overlap import ForwardBackwardOverlap
from mindspeed_patches.fb_overlap.side_states import named_modules, swapped

__all__ = ["Census"]

_PACKAGES = ("megatron.", "mindspeed.", "mindspeed_llm.", "transformer_engine.")
_HARMLESS = (
    "mindspeed_llm.training.utils._ACTUAL_ATTN_RATIO_LIST",
    "mindspeed_llm.training.utils._ACTUAL_COUNT",
)
"""Names that both sides write but that do not affect results: statistics of ``--log-throughput``
about the lengths of packed documents."""
_SNAPSHOTS = 100
"""The most comparisons per side of a micro-batch; the layers after them repeat the same code."""


class Census:
    """Replaces :class:`~commfuse_npu.overlap.ForwardBackwardOverlap` in the first step.

    Attributes:
        kept: device memory in bytes that the forward of a model chunk leaves allocated for its
            backward: the largest value observed; 0 on a CPU.
    """

    def __init__(self, overlap: ForwardBackwardOverlap, models: Sequence[torch.nn.Module]) -> None:
        self.kept = 0
        self._overlap, self._models = overlap, models
        self._owners = dict(_owners(models))
        self._wrote: tuple[set[tuple[str, str]], set[tuple[str, str]]] = set(), set()
        self._before: dict[tuple[str, str], Any] = {}
        self._allocated: Callable[[], int] = int  # returns 0: torch counts no bytes on a CPU
        if overlap.device != "cpu":
            self._allocated = torch.get_device_module(overlap.device).memory_allocated

    def run(
        self, forward: Callable[[], Any], backward: Callable[[], Any], kind: Hashable
    ) -> tuple[Any, Any]:
        """Run forward, then backward, as Megatron does; record the times that choose the order."""
        return self._overlap.record(partial(self._weighed, forward), backward, kind, self._look)

    def _weighed(self, forward: Callable[[], Any]) -> Any:
        before = self._allocated()
        result = forward()
        self.kept = max(self.kept, self._allocated() - before)
        return result

    def _look(self, side: int, passed: int | None) -> None:
        """Record the names that a side (0 or 1) has written since the last call."""
        if passed is not None and passed > _SNAPSHOTS:
            return
        before, self._before = (
            self._before,
            {
                (owner, name): tuple(value) if isinstance(value, list) else value
                for owner, attributes in self._owners.items()
                for name, value in list(attributes.items())
            },
        )
        if passed != 0:
            self._wrote[side].update(
                name for name, value in self._before.items() if not _same(before.get(name), value)
            )

    @property
    def unknown(self) -> list[str]:
        """Names that both sides wrote and that are not swapped."""
        swaps = {
            (id(vars(owner)), name)
            for owner, names in swapped(self._models)
            for name in names or vars(owner)
        }
        written = {
            f"{owner}.{name}"
            for owner, name in self._wrote[0] & self._wrote[1]
            if (id(self._owners[owner]), name) not in swaps
        }
        return sorted(written - set(_HARMLESS))


def _same(before: Any, value: Any) -> bool:
    if before is value:
        return True
    if isinstance(value, tuple) and isinstance(before, tuple):
        return len(before) == len(value) and all(map(_same, before, value))
    return isinstance(value, (int, float, str)) and bool(before == value)


def _owners(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of objects that hold state, and their attributes.

    These are the Python modules of the packages, the modules of the models, the objects that these
    hold, and the objects inside those that are swapped completely, such as expert dispatchers.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(_PACKAGES) and module is not None:
            yield name, vars(module)
    whole = {id(owner) for owner, names in swapped(models) if not names}
    visited: set[int] = set()

    def held_by(owner: str, attributes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield owner, attributes
        for name, value in list(attributes.items()):
            ours = type(value).__module__.startswith(_PACKAGES) and hasattr(value, "__dict__")
            if ours and not isinstance(value, torch.nn.Module) and id(value) not in visited:
                visited.add(id(value))
                if id(value) in whole:
                    yield from held_by(f"{owner}.{name}", vars(value))
                else:
                    yield f"{owner}.{name}", vars(value)

    for path, layer in named_modules(models):
        yield from held_by(path, vars(layer))
