"""Importing this replaces the contents of MindSpeed's list, then applies the patches."""

from mindspeed.features_manager import MindSpeedFeaturesManager

from mindspeed_patches.patching import Feature

MindSpeedFeaturesManager.set_features_list([Feature("own-of-llm")])
MindSpeedFeaturesManager.apply_features_patches()
