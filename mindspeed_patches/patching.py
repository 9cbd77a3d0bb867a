"""A patch manager and features with the calls of MindSpeed's, also without MindSpeed.

:class:`PatchManager` does what MindSpeed's does for wrappers (``mindspeed/patch_utils.py``, read at
the branch ``master``):

- patches take effect only in :meth:`PatchManager.apply_patches`;
- a function whose name ends in ``wrapper`` or ``decorator`` is called with the original, and its
  result replaces the original; several of them stack, the first registered innermost;
- names that other modules imported are rebound too, so a wrapper must call the function it was
  given and never import the original.

Unlike MindSpeed's global manager, each manager here is a separate object, removing its patches
restores exactly what it changed, and patching a missing function is an error.  :func:`around`
creates wrappers for either manager.
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
    """Make a patch-manager wrapper of ``name_wrapper(self, original, *args, **kwargs)``.

    The method runs in place of the original, with the arguments of the call.
    """

    @functools.wraps(method)
    def wrapper(self: Any, original: Function) -> Function:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return method(self, original, *args, **kwargs)

        return wrapped

    return wrapper


def _holders(name: str, value: Any) -> list[Any]:
    """Modules in which the attribute ``name`` is ``value`` itself."""
    modules = list(sys.modules.values())
    return [module for module in modules if getattr(module, "__dict__", {}).get(name) is value]


class PatchManager:
    """Collects patches and applies them together."""

    def __init__(self) -> None:
        self._wrappers: dict[str, list[Function]] = {}
        self._changed: list[tuple[Any, str, Any, Function]] = []

    def register_patch(self, orig_func_name: str, new_func: Function) -> None:
        """Store a wrapper for the function at a dotted path.

        Args:
            orig_func_name: ``package.module.function`` or ``package.module.Class.method``.
            new_func: see the module's docstring.

        Raises:
            ValueError: MindSpeed would not take the function for a wrapper.
        """
        name = getattr(new_func, "__name__", "")
        if not name.endswith(("wrapper", "decorator")):
            raise ValueError(
                f"{name or new_func} would replace {orig_func_name}; wrap it instead (a name that "
                "ends in _wrapper)"
            )
        wrappers = self._wrappers.setdefault(orig_func_name, [])
        if new_func not in wrappers:
            wrappers.append(new_func)

    def apply_patches(self) -> None:
        """Apply all patches, including those registered since the last call.

        Raises:
            AttributeError, ModuleNotFoundError: a function does not exist.
        """
        self._undo()
        for path, wrappers in self._wrappers.items():
            owner_path, _, name = path.rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            original = getattr(owner, name)
            new = original
            for wrapper in wrappers:
                new = wrapper(new)
            for holder in (owner, *_holders(name, original)):
                self._changed.append((holder, name, vars(holder).get(name, _INHERITED), new))
                setattr(holder, name, new)

    def remove_patches(self) -> None:
        """Restore the original functions, and forget all patches."""
        self._undo()
        self._wrappers.clear()

    def _undo(self) -> None:
        """Restore the originals, also in modules that imported a patched function later."""
        while self._changed:
            owner, name, before, new = self._changed.pop()
            if before is _INHERITED:
                delattr(owner, name)
                continue
            for holder in (owner, *_holders(name, new)):
                setattr(holder, name, before)


class Feature:
    """A feature: options, and patches that apply if the option of the same name is set.

    MindSpeed's manager calls these hooks of every feature in its list, whatever its class (read).

    Args:
        feature_name: the name of that option, ``use-commfuse`` or ``use_commfuse``.
        optimization_level: the smallest ``--optimization-level`` that includes the feature.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        """Whether the hooks that register patches are called for these arguments."""
        included = self.optimization_level <= args.optimization_level
        return bool(included and getattr(args, self.feature_name, None))

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Declare options; called on the early parser and on Megatron's."""

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Register patches."""

    def validate_args(self, args: argparse.Namespace) -> None:
        """Check the final arguments; called after Megatron's own checks."""

    def _do_nothing(self, *args: Any) -> None:
        """Take the place of MindSpeed's other hooks."""

    pre_register_patches = pre_validate_args = post_validate_args = _do_nothing
