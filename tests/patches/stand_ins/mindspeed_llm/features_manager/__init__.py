"""Importing the package replaces the contents of MindSpeed's list by MindSpeed-LLM's features."""

from __future__ import annotations

from mindspeed.features_manager import MindSpeedFeature, MindSpeedFeaturesManager

MindSpeedFeaturesManager.set_features_list([MindSpeedFeature("own-of-llm")])
