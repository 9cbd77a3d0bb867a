"""Importing this gets the list of features replaced, then applies their patches."""

from __future__ import annotations

import argparse
import importlib

from mindspeed.args_utils import early_arguments
from mindspeed.features_manager import MindSpeedFeaturesManager


class FeatureAdaptor:
    @classmethod
    def get_mindspeed_llm_args(cls) -> argparse.Namespace:
        importlib.import_module("mindspeed_llm.features_manager")
        return early_arguments()

    @classmethod
    def execute(cls) -> None:
        MindSpeedFeaturesManager.apply_features_patches(cls.get_mindspeed_llm_args())


FeatureAdaptor.execute()
