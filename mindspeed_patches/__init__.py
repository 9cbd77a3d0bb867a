"""CommFuse inside Megatron's layers: wrappers of their forward methods, and how to apply them.

Imports go one way: this package imports Megatron and MindSpeed, ``commfuse_npu`` imports neither.
Names are imported at their first use, so that the launcher can say that torch is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commfuse_npu.launch.options import LAYERS
    from mindspeed_patches.patching import PatchManager
    from mindspeed_patches.registration import install
    from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["LAYERS", "LinearWrappers", "PatchManager", "install"]

_MODULES = {
    "LAYERS": "commfuse_npu.launch.options",
    "LinearWrappers": "mindspeed_patches.wrappers",
    "PatchManager": "mindspeed_patches.patching",
    "install": "mindspeed_patches.registration",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
