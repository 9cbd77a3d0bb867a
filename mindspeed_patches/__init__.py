"""CommFuse inside Megatron's layers: forward wrappers, and what applies them.

Imports point down: this package knows Megatron and MindSpeed, ``commfuse_npu`` knows neither.
"""

from __future__ import annotations

from mindspeed_patches.patching import PatchManager
from mindspeed_patches.registration import install
from mindspeed_patches.wrappers import LAYERS, LinearWrappers

__all__ = ["LAYERS", "LinearWrappers", "PatchManager", "install"]
