"""CommFuse inside Megatron's layers: wrappers of their forward methods, and how to apply them.

Imports go one way: this package imports Megatron and MindSpeed, ``commfuse_npu`` imports neither.
"""

from __future__ import annotations

from commfuse_npu.launch.options import LAYERS
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.registration import install
from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["LAYERS", "LinearWrappers", "PatchManager", "install"]
