"""Small stand-ins for MindSpeed's patch manager and features, for machines without MindSpeed.

Same calls, same semantics (``mindspeed/patch_utils.py`` and ``mindspeed/features_manager``, read at
the branch ``master``), as far as wrappers need them.  Of the patch manager:

- nothing changes before :meth:`PatchManager.apply_patches`;
- a function whose name ends in ``wrapper`` or ``decorator`` is called with the original and its
  result takes the original's place; several of them stack, the first registered innermost;
- any other function replaces the original, and a second replacement raises;
- what other modules imported under the same name is rebound too, so a wrapper must call the
  function it was given and never import the original.

Unlike MindSpeed's, a manager is an object of its own, removing its patches puts back exactly what
it changed, and a function that does not exist is an error.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Feature", "PatchManager"]

Function = Callable[..., Any]

_INHERITED = object()


class _Patch:
    """What is registered for one path, and what was changed for it."""

    def __init__(self) -> None:
        self.replacement: Function | None = None
        self.wrappers: list[Function] = []
        self._changed: list[tuple[Any, str, Any]] = []
        self._installed: Any = None

    def apply(self, path: str) -> None:
        owner, name = _find(path)
        original = getattr(owner, name)
        new = self.replacement or original
        for wrapper in self.wrappers:
            new = wrapper(new)
        self._installed = new
        for holder in (owner, *_holders(name, original)):
            self._changed.append((holder, name, vars(holder).get(name, _INHERITED)))
            setattr(holder, name, new)

    def undo(self) -> None:
        """Put back what was there, also in modules that imported the patched function since."""
        for owner, name, before in reversed(self._changed):
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
                for module in _holders(name, self._installed):
                    setattr(module, name, before)
        self._changed.clear()


def _holders(name: str, value: Any) -> list[Any]:
    """Modules in which ``name`` is this very object."""
    modules = list(sys.modules.values())
    return [module for module in modules if getattr(module, "__dict__", {}).get(name) is value]


def _find(path: str) -> tuple[Any, str]:
    """The module or class that holds the last name of a dotted path, and that name."""
    *parents, name = path.split(".")
    owner: Any = None
    for depth, part in enumerate(parents, 1):
        module = ".".join(parents[:depth])
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = str(error.name)
            # Else the module is there; what it imports is not.
            its_own = missing == module or missing.startswith(f"{module}.")
            if not its_own or not hasattr(owner, part):
                raise
            owner = getattr(owner, part)
    if owner is None:
        raise ValueError(f"{path!r} names no module; give the full dotted path of a function")
    if not hasattr(owner, name):
        raise AttributeError(f"{'.'.join(parents)} has no {name}; it cannot be patched")
    return owner, name


class PatchManager:
    """Collects patches and applies them together."""

    def __init__(self) -> None:
        self._patches: dict[str, _Patch] = {}

    def register_patch(self, orig_func_name: str, new_func: Function) -> None:
        """Note a wrapper or a replacement for the function at a dotted path.

        Args:
            orig_func_name: ``package.module.function`` or ``package.module.Class.method``.
            new_func: see the module's docstring.

        Raises:
            RuntimeError: the function is replaced already.
        """
        patch = self._patches.setdefault(orig_func_name, _Patch())
        if getattr(new_func, "__name__", "").endswith(("wrapper", "decorator")):
            if new_func not in patch.wrappers:
                patch.wrappers.append(new_func)
        elif patch.replacement is not None:
            raise RuntimeError(
                f"{orig_func_name} is replaced already; wrap it instead (a name that ends in "
                "_wrapper)"
            )
        else:
            patch.replacement = new_func

    def apply_patches(self) -> None:
        """Put all patches in force, those registered since among them."""
        self._undo()
        for path, patch in self._patches.items():
            patch.apply(path)

    def remove_patches(self) -> None:
        """Put back what was there, and forget everything."""
        self._undo()
        self._patches.clear()

    def _undo(self) -> None:
        for patch in reversed(self._patches.values()):
            patch.undo()


class Feature:
    """A feature: options, and patches that are in force if its own option is set.

    Args:
        feature_name: of the option, ``use-commfuse`` or ``use_commfuse``.
        optimization_level: the smallest ``--optimization-level`` that includes the feature.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        """Whether the hooks that register patches are called."""
        included = self.optimization_level <= args.optimization_level
        return bool(included and getattr(args, self.feature_name, None))

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Declare options; called on the early parser and on Megatron's."""

    def pre_register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Register patches that have to be in force before Megatron is imported."""

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Register patches."""

    def validate_args(self, args: argparse.Namespace) -> None:
        """After Megatron's own checks."""
