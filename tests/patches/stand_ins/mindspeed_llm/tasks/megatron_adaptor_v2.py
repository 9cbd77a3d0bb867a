"""Importing this replaces the contents of MindSpeed's list, then applies the patches."""

from mindspeed.features_manager.features_manager import Feature, MindSpeedFeaturesManager

MindSpeedFeaturesManager.set_features_list([Feature("own_of_llm")])
MindSpeedFeaturesManager.apply_features_patches()
