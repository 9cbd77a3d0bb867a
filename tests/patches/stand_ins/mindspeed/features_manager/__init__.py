"""Importing the package fills the list with MindSpeed's own features."""

from __future__ import annotations

from .feature import MindSpeedFeature
from .features_manager import MindSpeedFeaturesManager

MindSpeedFeaturesManager.set_features_list([MindSpeedFeature("own-of-mindspeed")])
