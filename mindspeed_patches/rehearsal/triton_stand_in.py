"""Stand-in for Triton, which MindSpeed imports from its branch for Megatron core 0.16 on.

Kernels can be declared, not called.  torch must have looked for Triton before.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULES = (
    *("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice"),
    *("triton.runtime", "triton.runtime.driver"),
)


class _Triton(ModuleType):
    """A module that is each of its attributes, decorators and kernels, too."""

    __version__ = "3.2.0"

    def __getattr__(self, name: str) -> _Triton:
        if name.startswith("__") or name == "active":  # the driver of a device
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Triton:
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError(
            "a kernel of Triton is not emulated; leave out the option that uses it"
        )


def install() -> None:
    """Make the modules importable, permanently in this process."""
    import torch._dynamo  # noqa: F401

    for name in _MODULES:
        module = _Triton(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
