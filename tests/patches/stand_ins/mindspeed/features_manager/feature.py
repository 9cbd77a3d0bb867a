from __future__ import annotations

from mindspeed_patches.patching import Feature as MindSpeedFeature

__all__ = ["MindSpeedFeature"]
