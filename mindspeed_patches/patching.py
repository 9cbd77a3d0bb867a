"""A patch manager with the calls of MindSpeed's, for use without MindSpeed.

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

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Function = Callable[..., Any]


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


def register(manager: Any, owner: str, *wrappers: Function) -> None:
    """Register wrappers with a patch manager: ``name_wrapper`` is that of ``owner.name``."""
    for wrapper in wrappers:
        name = wrapper.__name__.removesuffix("_wrapper")
        manager.register_patch(f"{owner}.{name}", wrapper)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of one object, not of its class, and restore the previous ones at the end."""
    values = vars(owner)
    before = {name: values[name] for name in attributes if name in values}
    values.update(attributes)
    try:
        yield
    finally:
        values.update(before)
        for name in attributes.keys() - before.keys():
            values.pop(name, None)


def _replace(owner: Any, name: str, before: Function, after: Function) -> None:
    """Replace a function in a module or class, and in all modules that imported it."""
    modules = [module for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    for holder in (owner, *(module for module in modules if vars(module).get(name) is before)):
        setattr(holder, name, after)


class PatchManager:
    """Collects patches and applies them together."""

    def __init__(self) -> None:
        self._wrappers: dict[str, list[Function]] = {}
        self._applied = ExitStack()

    def register_patch(self, orig_func_name: str, new_func: Function) -> None:
        """Store a wrapper for ``package.module.function`` or ``package.module.Class.method``."""
        wrappers = self._wrappers.setdefault(orig_func_name, [])
        if new_func not in wrappers:
            wrappers.append(new_func)

    def apply_patches(self) -> None:
        """Apply all patches, including those registered since the last call.

        Raises:
            AttributeError, ModuleNotFoundError: a function does not exist.
        """
        self._applied.close()
        for path, wrappers in self._wrappers.items():
            owner_path, _, name = path.rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            original = new = getattr(owner, name)
            for wrapper in wrappers:
                new = wrapper(new)
            _replace(owner, name, original, new)
            self._applied.callback(_replace, owner, name, new, original)

    def applied(self) -> ExitStack:
        """Apply all patches in the block; they may be applied again later."""
        self.apply_patches()
        return self._applied

    def remove_patches(self) -> None:
        """Forget all patches; restore the originals, also in modules that imported a patched
        function later.
        """
        self._applied.close()
        self._wrappers.clear()
