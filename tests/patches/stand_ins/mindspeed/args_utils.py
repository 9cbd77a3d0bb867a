"""Early arguments: undeclared options are strings, lists of strings or True."""

from __future__ import annotations

import argparse
from functools import lru_cache

from mindspeed.features_manager import MindSpeedFeaturesManager


def early_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--optimization-level", type=int, default=2)
    MindSpeedFeaturesManager.register_features_args(parser)
    args, unknown = parser.parse_known_args()
    name = None
    for word in unknown:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            setattr(args, name, True)
        else:
            setattr(args, name, word)
    return args


@lru_cache(maxsize=1)
def get_mindspeed_args() -> argparse.Namespace:
    return early_arguments()
