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
it changed, and a function that does not exist is an error.  :func:`around` writes wrappers for
either manager.
"""

from __future__ import annotations

import argparse
import functools
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Feature", "PatchManager", "around"]

Function = Callable[..., Any]

_INHERITED = object()


def around(method: Function) -> Function:
    """A wrapper for patch managers, of a method ``name_wrapper(self, original, *args, **kwargs)``.

    The method runs in place of the original, with the arguments of its call.
    """

    @functools.wraps(method)
    def wrapper(self: Any, original: Function) -> Function:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return method(self, original, *args, **kwargs)

        return wrapped

    return wrapper


def _holders(name: str, value: Any) -> list[Any]:
    """Modules in which ``name`` is this very object."""
    modules = list(sys.modules.values())
    return [module for module in modules if getattr(module, "__dict__", {}).get(name) is value]


class PatchManager:
    """Collects patches and applies them together."""

    def __init__(self) -> None:
        self._replacements: dict[str, Function | None] = {}
        self._wrappers: dict[str, list[Function]] = {}
        self._changed: list[tuple[Any, str, Any, Function]] = []

    def register_patch(self, orig_func_name: str, new_func: Function) -> None:
        """Note a wrapper or a replacement for the function at a dotted path.

        Args:
            orig_func_name: ``package.module.function`` or ``package.module.Class.method``.
            new_func: see the module's docstring.

        Raises:
            RuntimeError: the function is replaced already.
        """
        replacement = self._replacements.setdefault(orig_func_name, None)
        wrappers = self._wrappers.setdefault(orig_func_name, [])
        if getattr(new_func, "__name__", "").endswith(("wrapper", "decorator")):
            if new_func not in wrappers:
                wrappers.append(new_func)
        elif replacement is not None:
            raise RuntimeError(
                f"{orig_func_name} is replaced already; wrap it instead (a name that ends in "
                "_wrapper)"
            )
        else:
            self._replacements[orig_func_name] = new_func

    def apply_patches(self) -> None:
        """Put all patches in force, those registered since among them.

        Raises:
            AttributeError, ModuleNotFoundError: a function does not exist.
        """
        self._undo()
        for path, replacement in self._replacements.items():
            owner_path, _, name = path.rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            original = getattr(owner, name)
            new = replacement or original
            for wrapper in self._wrappers[path]:
                new = wrapper(new)
            for holder in (owner, *_holders(name, original)):
                self._changed.append((holder, name, vars(holder).get(name, _INHERITED), new))
                setattr(holder, name, new)

    def remove_patches(self) -> None:
        """Put back what was there, and forget everything."""
        self._undo()
        self._replacements.clear()
        self._wrappers.clear()

    def _undo(self) -> None:
        """Put back what was there, also in modules that imported a patched function since."""
        while self._changed:
            owner, name, before, new = self._changed.pop()
            if before is _INHERITED:
                delattr(owner, name)
                continue
            for holder in (owner, *_holders(name, new)):
                setattr(holder, name, before)


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
