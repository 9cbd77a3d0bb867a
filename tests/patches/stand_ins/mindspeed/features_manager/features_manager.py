from __future__ import annotations

from typing import ClassVar

from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed_patches.patching import Feature, FeaturesManager


class MindSpeedFeaturesManager(FeaturesManager):
    FEATURES_LIST: ClassVar[list[Feature]] = []
    patches = MindSpeedPatchesManager
