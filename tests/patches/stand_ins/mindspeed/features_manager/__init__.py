"""Importing the package fills the list with MindSpeed's own features."""

from .features_manager import Feature, MindSpeedFeaturesManager

MindSpeedFeaturesManager.set_features_list([Feature("own_of_mindspeed")])
