"""Importing the package fills the list with MindSpeed's own features."""

from mindspeed_patches.patching import Feature

from .features_manager import MindSpeedFeaturesManager

MindSpeedFeaturesManager.set_features_list([Feature("own-of-mindspeed")])
