"""The list of features, and the class that calls their hooks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import ClassVar

from mindspeed.patch_utils import MindSpeedPatchesManager as Patches
from mindspeed_patches.patching import Feature


class MindSpeedFeaturesManager:
    FEATURES_LIST: ClassVar[list[Feature]] = []

    @classmethod
    def set_features_list(cls, features_list: Sequence[Feature]) -> None:
        """Replace the contents of the list, in place."""
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def register_features_args(cls, parser: argparse.ArgumentParser) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def apply_features_patches(cls, args: argparse.Namespace) -> None:
        """Apply patches needed before Megatron is imported, then the others."""
        needed = [feature for feature in cls.FEATURES_LIST if feature.is_need_apply(args)]
        for feature in needed:
            feature.pre_register_patches(Patches, args)
        Patches.apply_patches()
        for feature in needed:
            feature.register_patches(Patches, args)
        Patches.apply_patches()
