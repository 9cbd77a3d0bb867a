"""Importing this applies the patches of all features."""

from mindspeed.features_manager import MindSpeedFeaturesManager

MindSpeedFeaturesManager.apply_features_patches()
