"""The list of features, and the class that calls their hooks."""

import argparse
from collections.abc import Sequence
from typing import Any, ClassVar

from mindspeed.patch_utils import MindSpeedPatchesManager as Patches


class Feature:
    """A feature of the packages' own, which is never applied."""

    def __init__(self, feature_name: str) -> None:
        self.feature_name = feature_name

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        return False

    def register_args(self, parser: argparse.ArgumentParser) -> None: ...


def early_arguments(features: Sequence[Any]) -> argparse.Namespace:
    """Undeclared options are strings or True."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for feature in features:
        feature.register_args(parser)
    args, unknown = parser.parse_known_args()
    for word, following in zip(unknown, [*unknown[1:], "--"], strict=True):
        if word.startswith("--"):
            value = following.startswith("--") or following
            setattr(args, word[2:].replace("-", "_"), value)
    return args


class MindSpeedFeaturesManager:
    FEATURES_LIST: ClassVar[list[Any]] = []

    @classmethod
    def set_features_list(cls, features_list: Sequence[Any]) -> None:
        """Replace the contents of the list, in place."""
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def apply_features_patches(cls) -> None:
        """Apply patches needed before Megatron is imported, then the others."""
        args = early_arguments(cls.FEATURES_LIST)
        needed = [feature for feature in cls.FEATURES_LIST if feature.is_need_apply(args)]
        for register in ("pre_register_patches", "register_patches"):
            for feature in needed:
                getattr(feature, register)(Patches, args)
            Patches.apply_patches()
