from __future__ import annotations

from mindspeed_patches.patching import PatchManager

MindSpeedPatchesManager = PatchManager()
