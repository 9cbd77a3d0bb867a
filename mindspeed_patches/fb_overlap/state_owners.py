"""Where passes may keep state outside the autograd graph: modules, classes, objects, closures.

Code of Megatron, MindSpeed, MindSpeed-LLM and TransformerEngine is known by name.  *Foreign*
modules are all others that a pass may run, except libraries.  They define

- classes of the models, and of the objects that their layers hold;
- functions that were patched into known modules, their classes or a layer, as methods, hooks or
  wrappers;
- functions outside of the models, as ``forward_step_func``.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_KNOWN = ("megatron.", "mindspeed.", "mindspeed_llm.", "transformer_engine.")
_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "torch_npu", "numpy", "typing_extensions", "commfuse_npu", "mindspeed_patches"),
}
_OF_A_STEP = "megatron.core.distributed."
"""Defines gradient buckets, which hold sums over micro-batches."""

CONTAINERS = (list, tuple, dict, set, deque)

Models = Sequence[torch.nn.Module]
"""The chunks of a model on a rank."""


class Closure:
    """The variables that a function closes over, as attributes."""

    __slots__ = ("_cells",)

    def __init__(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        object.__setattr__(
            self, "_cells", dict(zip(names, function.__closure__ or (), strict=True))
        )

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        values = {}
        for name, cell in self._cells.items():
            with suppress(ValueError):  # a variable that has no value yet
                values[name] = cell.cell_contents
        return values

    def __getattr__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setattr__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value


def named_modules(models: Models) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules, with paths that are unique across model chunks."""
    for chunk, model in enumerate(models):
        for path, module in model.named_modules():
            yield f"chunk {chunk}, {path}: {type(module).__name__}", module


def state_owners(
    models: Models,
    functions: Iterable[Callable[..., Any]],
    whole: Iterable[Any],
) -> dict[str, Any]:
    """Whatever has attributes that a pass may write, by name.

    These are the known and the foreign modules, what foreign modules import, the classes of all of
    them, foreign functions with their closures, the layers, and objects: those in attributes of
    layers and classes, of foreign modules, of foreign objects and of ``whole`` ones, directly or in
    containers.

    Args:
        functions: code outside of the models that a forward runs.
        whole: objects that are swapped completely.
    """
    search = _Search(whole)
    for name, module in list(sys.modules.items()):
        if module is not None and f"{name}.".startswith(_KNOWN):
            search.add_module(name, module)
    for path, layer in named_modules(models):
        search.add(path, layer)
    for function in functions:
        search.add_functions("forward_step_func", function)
    search.follow_foreign()
    return search.found


class _Search:
    """Collects owners; see :func:`state_owners`."""

    def __init__(self, whole: Iterable[Any]) -> None:
        self.found: dict[str, Any] = {}
        self._whole = {id(owner) for owner in whole}
        self._visited: set[int] = set()
        # Names of modules that define foreign code, in the order in which they were found.
        self._foreign: dict[str, None] = {}

    def follow_foreign(self) -> None:
        """Add the foreign modules that were met, and what they import."""
        imported: dict[str, ModuleType] = {}
        done: set[str] = set()
        while found := [name for name in self._foreign if name not in done]:
            for module in (sys.modules[name] for name in found if name in sys.modules):
                self.add_module(module.__name__, module)
                modules = [one for one in vars(module).values() if isinstance(one, ModuleType)]
                imported.update({one.__name__: one for one in modules})
            done.update(found)
        for name, module in imported.items():
            if _is_foreign(name) and name not in done:
                self.add_module(name, module, follow=False)

    def add_module(self, name: str, module: ModuleType, follow: bool = True) -> None:
        foreign = follow and _is_foreign(name)
        self.add(name, module, objects=foreign, functions=follow and not foreign)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                self.add(f"{name}.{attribute}", value, functions=not foreign)

    def add(self, name: str, owner: Any, objects: bool = True, functions: bool = True) -> None:
        """Add an owner and what its attributes hold."""
        if id(owner) in self._visited:
            return
        self._visited.add(id(owner))
        while name in self.found:
            name += "'"
        self.found[name] = owner
        if _is_foreign(type(owner).__module__):
            self._foreign[type(owner).__module__] = None
        for attribute, value in list(vars(owner).items()):
            if not attribute.startswith("__"):
                self._look_into(f"{name}.{attribute}", value, objects, functions)

    def _look_into(self, name: str, value: Any, objects: bool, functions: bool) -> None:
        if isinstance(value, CONTAINERS):
            if id(value) not in self._visited:
                self._visited.add(id(value))
                items = value.values() if isinstance(value, dict) else value
                for number, item in enumerate(list(items)):
                    self._look_into(f"{name}[{number}]", item, objects, functions)
        elif objects and self._holds_state(value):
            followed = id(value) in self._whole or _is_foreign(type(value).__module__)
            self.add(name, value, objects=followed, functions=False)
        elif functions:
            self.add_functions(name, value)

    def add_functions(self, name: str, value: Any) -> None:
        """Add the foreign functions that a call of this runs, behind methods and wrappers."""
        if isinstance(value, FunctionType):
            # A library's function keeps its name in wrappers, as of tools that count collectives.
            if id(value) in self._visited or _is_of_library(str(value.__module__)):
                return
            defined = str(value.__globals__.get("__name__"))
            if _is_foreign(defined):
                self._foreign[defined] = None
                self.add(name, value, functions=False)
                self.add(f"{name}: closure", Closure(value))
            else:
                self._visited.add(id(value))
            inner = [getattr(value, "__wrapped__", None), *vars(Closure(value)).values()]
        elif isinstance(value, functools.partial):
            inner = [value.func]
        elif isinstance(value, property):
            inner = [value.fget]
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            inner = [value.__func__]
        else:
            return
        for part in inner:
            self.add_functions(name, part)

    def _holds_state(self, value: Any) -> bool:
        """Whether this is an object of a class that is no library's."""
        kind = type(value)
        if not kind.__dictoffset__ or isinstance(value, (torch.nn.Module, type, Enum)):
            return False
        if kind.__module__.startswith(_OF_A_STEP) or _is_of_library(kind.__module__):
            return False
        # Known objects that are called are functions, timers and the like.
        return _is_foreign(kind.__module__) or not callable(value)


def _is_foreign(module: str) -> bool:
    return not f"{module}.".startswith(_KNOWN) and not _is_of_library(module)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
