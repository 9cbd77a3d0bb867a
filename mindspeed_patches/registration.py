"""Adds the feature to MindSpeed's list, without an edit of anybody's source.

MindSpeed-LLM replaces the contents of the list while it is imported, so that what was appended
before is lost, and what is appended after comes too late for the patches.  Wrapping the call that
replaces the contents works in either case (run on CPU with MindSpeed-LLM 2.2.0 to master).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commfuse_npu.packages import TOGETHER, WHY_WITHOUT, WITHOUT_MINDSPEED, find_package, numbers

if TYPE_CHECKING:
    from mindspeed_patches.fb_overlap.feature import ForwardBackwardFeature
    from mindspeed_patches.feature import CommFuseFeature

__all__ = ["install"]

_LLM_ADAPTOR = "mindspeed_llm.tasks.megatron_adaptor_v2"
_CORE_ADAPTOR = "mindspeed.megatron_adaptor"


def install() -> CommFuseFeature:
    """Make the options known to MindSpeed, and in force what is on the command line.

    Call it after ``import torch``, best before ``import mindspeed_llm`` (or
    ``mindspeed.megatron_adaptor`` without MindSpeed-LLM); later it patches what those have left.
    A second call changes nothing.

    Returns:
        the feature of ``--use-commfuse``, the same at every call.

    Raises:
        RuntimeError: MindSpeed is missing, it or MindSpeed-LLM is too old, or Megatron too new.
        IncompatibleOptionsError: called late, with options that exclude CommFuse.
    """
    _check_llm()
    _check_megatron()
    manager = _features_manager()
    features = _features()
    if getattr(manager.set_features_list, "keeps", None) is features:
        return features[0]
    _keep(features, manager)
    late = _early_arguments_of_a_finished_import()
    if late is not None:
        for feature in features:
            _apply(feature, late())
    return features[0]


@functools.cache
def _features() -> tuple[CommFuseFeature, ForwardBackwardFeature]:
    from mindspeed_patches.fb_overlap.feature import ForwardBackwardFeature
    from mindspeed_patches.feature import CommFuseFeature

    return CommFuseFeature(), ForwardBackwardFeature()


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


def _check_llm() -> None:
    """Refuse a MindSpeed-LLM without features, found without importing it."""
    found = importlib.util.find_spec("mindspeed_llm")
    folders = found.submodule_search_locations if found is not None else None
    if folders and not any(
        (Path(p) / "tasks" / "megatron_adaptor_v2.py").exists() for p in folders
    ):
        raise RuntimeError(
            f"the MindSpeed-LLM in {next(iter(folders))} is 2.1.0 or older: it has no feature "
            f"manager, so that features cannot be added to it; use {TOGETHER}"
        )


def _check_megatron() -> None:
    """Refuse a Megatron core whose layers MindSpeed leaves to others, without importing it."""
    found = find_package("megatron", os.environ)
    if found is not None and found.version and numbers(found.version) >= WITHOUT_MINDSPEED:
        raise RuntimeError(
            f"Megatron core {found.version} in {found.folders[0]}: {WHY_WITHOUT}; use {TOGETHER}"
        )


def _keep(features: Sequence[Any], manager: Any) -> None:
    """Put the features at the end of the list, now and whenever the list is replaced."""
    replace_list = manager.set_features_list

    @functools.wraps(replace_list)
    def set_features_list(features_list: Sequence[Any]) -> None:
        others = [other for other in features_list if other not in features]
        replace_list([*others, *features])

    set_features_list.keeps = features  # type: ignore[attr-defined]
    manager.set_features_list = staticmethod(set_features_list)
    set_features_list(list(manager.FEATURES_LIST))


def _early_arguments_of_a_finished_import() -> Callable[[], Any] | None:
    """What gives the early arguments, if MindSpeed has applied its patches already."""
    llm = sys.modules.get(_LLM_ADAPTOR)
    if llm is not None:
        return llm.FeatureAdaptor.get_mindspeed_llm_args
    if _CORE_ADAPTOR in sys.modules:
        return importlib.import_module("mindspeed.args_utils").get_mindspeed_args
    return None


def _apply(feature: Any, args: Any) -> None:
    if not feature.is_need_apply(args):
        return
    manager = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    feature.pre_register_patches(manager, args)
    feature.register_patches(manager, args)
    manager.apply_patches()
