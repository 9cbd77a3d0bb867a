"""Adds the feature to MindSpeed's list, without editing any source.

MindSpeed-LLM replaces the contents of the list while it is imported.  A feature appended before the
import is lost, and one appended after it comes too late for the patches.  This module therefore
wraps the function that replaces the contents, before the import (run on CPU with MindSpeed-LLM
2.2.0 to master).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from commfuse_npu.launch.packages import (
    TOGETHER,
    WHY_WITHOUT,
    WITHOUT_MINDSPEED,
    find_package,
    numbers,
)
from mindspeed_patches.feature import CommFuseFeature
from mindspeed_patches.patching import register

FEATURE = CommFuseFeature()
_APPLIES_PATCHES = ("mindspeed_llm.tasks.megatron_adaptor_v2", "mindspeed.megatron_adaptor")
"""Modules that apply the patches of all features while they are imported."""


def install() -> CommFuseFeature:
    """Add the options to MindSpeed, which applies those that are on the command line.

    Call it after ``import torch`` and before ``import mindspeed_llm`` (or
    ``mindspeed.megatron_adaptor`` without MindSpeed-LLM).  A second call changes nothing.

    Returns:
        The feature, the same object in every call.

    Raises:
        RuntimeError: MindSpeed is missing, it or MindSpeed-LLM is too old, or Megatron too new, or
            MindSpeed has applied its patches already.
    """
    _check_versions()
    manager = _features_manager()
    replace_list = manager.set_features_list
    if getattr(replace_list, "keeps", None) is FEATURE:
        return FEATURE
    for name in _APPLIES_PATCHES:
        if name in sys.modules:
            raise RuntimeError(
                f"mindspeed_patches.install() comes too late: {name} is imported, and has applied "
                "the patches of all features; call it after import torch and before the import of "
                "mindspeed_llm or mindspeed.megatron_adaptor, or start the script with -m "
                "mindspeed_patches.launch"
            )

    @functools.wraps(replace_list)
    def set_features_list(features_list: Sequence[Any]) -> None:
        replace_list([*(other for other in features_list if other is not FEATURE), FEATURE])

    set_features_list.keeps = FEATURE  # type: ignore[attr-defined]
    manager.set_features_list = staticmethod(set_features_list)
    set_features_list(list(manager.FEATURES_LIST))
    return FEATURE


def wrap_training(*wrappers: Callable[..., Any]) -> None:
    """Wrap functions of ``megatron.training.training``, so that the feature's changes are inside.

    Call it before MindSpeed applies its patches.

    Args:
        wrappers: for :func:`.patching.register`; ``train_step_wrapper`` is that of ``train_step``.
    """
    manager = _features_manager()
    apply = manager.apply_features_patches

    def apply_features_patches(args: argparse.Namespace) -> None:
        apply(args)
        patches = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
        register(patches, "megatron.training.training", *wrappers)
        patches.apply_patches()

    manager.apply_features_patches = staticmethod(apply_features_patches)


def _features_manager() -> Any:
    try:
        module = importlib.import_module("mindspeed.features_manager.features_manager")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("mindspeed"):
            raise
        raise RuntimeError(
            f"{error}: the feature needs MindSpeed on the Python path, {TOGETHER}. Without "
            "MindSpeed use mindspeed_patches.LinearWrappers on Megatron's layers"
        ) from error
    return module.MindSpeedFeaturesManager


def _check_versions() -> None:
    """Refuse a MindSpeed-LLM without a feature manager, and a Megatron core that is too new for it.

    Both packages are located without importing them.
    """
    llm = find_package("mindspeed_llm", {})
    if llm is not None and llm.folders and llm.folder_with("tasks/megatron_adaptor_v2.py") is None:
        raise RuntimeError(
            f"the MindSpeed-LLM in {llm.folders[0]} is 2.1.0 or older: it has no feature "
            f"manager, so that features cannot be added to it; use {TOGETHER}"
        )
    core = find_package("megatron", os.environ)
    if core is not None and core.version and numbers(core.version) >= WITHOUT_MINDSPEED:
        raise RuntimeError(
            f"Megatron core {core.version} in {core.folders[0]}: {WHY_WITHOUT}; use {TOGETHER}"
        )
