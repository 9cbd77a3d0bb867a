"""Small stand-ins for MindSpeed's patch manager and features, for machines without MindSpeed.

Same calls, same semantics (``mindspeed/patch_utils.py`` and ``mindspeed/features_manager``, read at
the branch ``master``).  Of the patch manager:

- nothing changes before :meth:`PatchManager.apply_patches`;
- a function whose name ends in ``wrapper`` or ``decorator`` is called with the original and its
  result takes the original's place; several of them stack, the first registered innermost;
- any other function replaces the original, and a second replacement raises unless it is forced;
- what other modules imported under the same name is rebound too, so a wrapper must call the
  function it was given and never import the original.

Unlike MindSpeed's, a manager is an object of its own, removing its patches puts back exactly what
it changed, and a function that does not exist is an error unless ``create_dummy`` is given.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

__all__ = ["Feature", "FeaturesManager", "PatchManager"]

Function = Callable[..., Any]


class _Patch:
    def __init__(self, path: str, create_dummy: bool) -> None:
        self.path = path
        self.create_dummy = create_dummy
        self.replacement: Function | None = None
        self.wrappers: list[Function] = []
        self.applied = False
        self._installed: Any = None
        self._changed: list[tuple[Any, str, Any]] = []

    def apply(self) -> None:
        """Put the patch in force, in place of an earlier version of it."""
        if self.applied:
            return
        self.undo()
        owner, name = _find(self.path, self.create_dummy)
        original = getattr(owner, name, None)
        new = self.replacement or original
        for wrapper in self.wrappers:
            new = wrapper(new)
        self._set(owner, name, new)
        for module in _holders(name, original):
            self._set(module, name, new)
        self._installed = new
        self.applied = True

    def _set(self, owner: Any, name: str, new: Any) -> None:
        self._changed.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def undo(self) -> None:
        """Put back what was there, also in modules that imported the patched function since."""
        if not self._changed:
            return
        _, name, original = self._changed[0]
        while self._changed:
            owner, name, before = self._changed.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        if original is not _ABSENT:
            for module in _holders(name, self._installed):
                setattr(module, name, original)
        self.applied = False


def _holders(name: str, value: Any) -> list[Any]:
    """Modules in which ``name`` is this very object."""
    if value is None:
        return []
    modules = list(sys.modules.values())
    return [module for module in modules if getattr(module, "__dict__", {}).get(name) is value]


_ABSENT = object()


def _find(path: str, create_dummy: bool) -> tuple[Any, str]:
    """The module or class that holds the last name of a dotted path, and that name."""
    *parents, name = path.split(".")
    owner: Any = None
    for depth, part in enumerate(parents, 1):
        module = ".".join(parents[:depth])
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = str(error.name)
            if missing != module and not missing.startswith(f"{module}."):
                # The module is there; what it imports is not.
                raise
            if owner is not None and hasattr(owner, part):
                owner = getattr(owner, part)
            elif create_dummy:
                dummy = types.ModuleType(module)
                sys.modules[module] = dummy
                if owner is not None:
                    setattr(owner, part, dummy)
                owner = dummy
            else:
                raise
    if owner is None:
        raise ValueError(f"{path!r} names no module; give the full dotted path of a function")
    if not hasattr(owner, name) and not create_dummy:
        raise AttributeError(f"{'.'.join(parents)} has no {name}; it cannot be patched")
    return owner, name


class PatchManager:
    """Collects patches and applies them together."""

    def __init__(self) -> None:
        self._patches: dict[str, _Patch] = {}

    def register_patch(
        self,
        orig_func_name: str,
        new_func: Function | None = None,
        force_patch: bool = False,
        create_dummy: bool = False,
    ) -> None:
        """Note a wrapper or a replacement for the function at a dotted path.

        Args:
            orig_func_name: ``package.module.function`` or ``package.module.Class.method``.
            new_func: see the module's docstring; ``None`` stands for a function that raises.
            force_patch: let a replacement take the place of an earlier one.
            create_dummy: make what is missing on the path instead of failing.

        Raises:
            RuntimeError: the function is replaced already.
        """
        if new_func is None:

            def missing(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError(f"{orig_func_name} does not exist here")

            new_func = missing
        patch = self._patches.setdefault(orig_func_name, _Patch(orig_func_name, create_dummy))
        if getattr(new_func, "__name__", "").endswith(("wrapper", "decorator")):
            if new_func not in patch.wrappers:
                patch.wrappers.append(new_func)
        elif patch.replacement is not None and not force_patch:
            raise RuntimeError(
                f"{orig_func_name} is replaced already; wrap it instead (a name that ends in "
                "_wrapper), or pass force_patch=True"
            )
        else:
            patch.replacement = new_func
        patch.applied = False

    def remove_wrappers(
        self,
        orig_func_name: str,
        wrappers_name: str | Sequence[str] | None,
        remove_check: bool = True,
    ) -> None:
        """Forget wrappers by name, all of them for ``None``; in force with the next apply.

        Raises:
            ValueError: nothing is registered for this function.
            RuntimeError: no wrapper has such a name, unless ``remove_check`` is off.
        """
        if orig_func_name not in self._patches:
            raise ValueError(f"no patch is registered for {orig_func_name}")
        patch = self._patches[orig_func_name]
        names = [wrappers_name] if isinstance(wrappers_name, str) else wrappers_name
        kept = [w for w in patch.wrappers if names is not None and w.__name__ not in names]
        if remove_check and len(kept) == len(patch.wrappers):
            raise RuntimeError(f"{orig_func_name} has no wrapper called {wrappers_name}")
        patch.wrappers = kept
        patch.applied = False

    def apply_patches(self) -> None:
        """Put all patches in force that are not yet."""
        for patch in self._patches.values():
            patch.apply()

    def remove_patches(self) -> None:
        """Put back what was there, and forget everything."""
        for patch in reversed(self._patches.values()):
            patch.undo()
        self._patches.clear()


class Feature:
    """A feature: options, and patches that are in force if its own option is set.

    Args:
        feature_name: of the option, ``use-commfuse`` or ``use_commfuse``.
        optimization_level: the smallest ``--optimization-level`` that includes the feature; a
            feature of level 0 always applies.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        """Whether the hooks that register patches are called."""
        if self.optimization_level == 0:
            return True
        included = self.optimization_level <= args.optimization_level
        return bool(included and getattr(args, self.feature_name, None))

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Declare options; called on the early parser and on Megatron's."""

    def pre_register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Register patches that have to be in force before Megatron is imported."""

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Register patches."""

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """Before Megatron's own checks."""

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """After Megatron's own checks."""

    def validate_args(self, args: argparse.Namespace) -> None:
        """After Megatron's own checks, too."""


class FeaturesManager:
    """The list of features, and what calls their hooks.

    MindSpeed's is one class with one list.  Here each subclass has its own: give it
    ``FEATURES_LIST`` and ``patches``.
    """

    FEATURES_LIST: ClassVar[list[Feature]]
    patches: ClassVar[PatchManager]

    @classmethod
    def set_features_list(cls, features_list: Sequence[Feature]) -> None:
        """Replace the contents of the list, in place."""
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def register_features_args(cls, parser: argparse.ArgumentParser) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def apply_features_pre_patches(cls, args: argparse.Namespace) -> None:
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.pre_register_patches(cls.patches, args)
        cls.patches.apply_patches()

    @classmethod
    def apply_features_patches(cls, args: argparse.Namespace) -> None:
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.register_patches(cls.patches, args)
        cls.patches.apply_patches()

    @classmethod
    def validate_features_args(cls, args: argparse.Namespace) -> None:
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)
