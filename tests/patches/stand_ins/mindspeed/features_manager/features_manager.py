from __future__ import annotations

from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed_patches.patching import FeaturesManager


class MindSpeedFeaturesManager(FeaturesManager):
    FEATURES_LIST = []
    patches = MindSpeedPatchesManager
