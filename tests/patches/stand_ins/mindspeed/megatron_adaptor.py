"""Importing this applies the patches of all features."""

from __future__ import annotations

from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager import MindSpeedFeaturesManager

MindSpeedFeaturesManager.apply_features_patches(get_mindspeed_args())
