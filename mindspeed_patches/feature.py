"""``--use-commfuse`` and ``--commfuse-overlap`` as a feature of MindSpeed.

MindSpeed calls the hooks of a feature in this order (read in its sources and run on CPU):
``register_args`` on an early parser; ``pre_register_patches`` and ``register_patches`` if a flag
is set; ``register_args`` again on Megatron's parser; then, with or without a flag,
``pre_validate_args``, Megatron's own checks, ``post_validate_args`` and ``validate_args``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import logging
import os
from typing import Any

from commfuse_npu.kernels import use_matmul_add
from commfuse_npu.launch.options import (
    DEFAULTS,
    OPTIONS,
    OVERLAP_OPTIONS,
    add_arguments,
)
from commfuse_npu.launch.refusals import (
    BESIDE,
    REFUSALS_OF,
    IncompatibleOptionsError,
    check_compatible,
)
from mindspeed_patches.fb_overlap.overlapping import Overlapping
from mindspeed_patches.training_options import LaunchSettings, register_wrappers
from mindspeed_patches.wrappers import LinearWrappers

_OVERLAPPED = "--commfuse-overlap"
_NORM_LAYERS = "mindspeed.te.pytorch.module.layernorm_column_parallel_linear"
_NORM_COLUMNS = "MindSpeedTELayerNormColumnParallelLinear", "TELayerNormColumnParallelLinear"
_logger = logging.getLogger(__name__)


class CommFuseFeature:
    """Fuses layers and lets passes take turns; each flag works with or without the other.

    MindSpeed's manager calls these hooks of every feature in its list, whatever its class (read).

    Attributes:
        wrappers: the linear wrappers with their call counts; ``None`` until patches are registered
            for ``--use-commfuse``.
        overlapping: the passes; ``None`` until patches are registered for
            ``--commfuse-overlap``.
    """

    feature_name = "use_commfuse"

    def __init__(self) -> None:
        self.wrappers: LinearWrappers | None = None
        self.overlapping: Overlapping | None = None

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        """Whether to register patches; at a lower level validate_args refuses the flags."""
        return _given(args, "use_commfuse") or _given(args, "commfuse_overlap")

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Declare options; called on the early parser and on Megatron's."""
        group = parser.add_argument_group(title="commfuse")
        add_arguments(group, OPTIONS | OVERLAP_OPTIONS)
        group.set_defaults(**DEFAULTS)

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Wrap the layers, the set-up of process groups, the creation of the model, the schedule.

        Raises what :meth:`.LaunchSettings.check` raises.
        """
        if _given(args, "use_commfuse"):
            self._fuse(patch_manager, args)
        if _given(args, "commfuse_overlap"):
            check_compatible(args, _OVERLAPPED)
            alone = "; ".join(
                f"{refusal.option}: {refusal.why}"
                for refusal in REFUSALS_OF[BESIDE]
                if refusal.given(args)
            )
            self.overlapping = Overlapping(
                plain_pipelines=_given(args, "commfuse_overlap_memory"),
                check=_given(args, "commfuse_overlap_check"),
                alone=alone or None,
                order_log=getattr(args, "commfuse_order_log", None),
            )
            self.overlapping.register(patch_manager)

    def _fuse(self, patch_manager: Any, args: argparse.Namespace) -> None:
        settings = LaunchSettings(args)
        settings.check()
        engine = getattr(args, "transformer_impl", "transformer_engine") == "transformer_engine"
        self.wrappers, users, report = register_wrappers(
            patch_manager,
            settings,
            norm_column=_norm_column() if engine else None,
        )
        for user in users:
            user.register_lanes(patch_manager)
        if _has_module("megatron.training"):  # Megatron core alone builds no model
            report.register(patch_manager)
        _use_mindspeeds_matmul_add()

    def validate_args(self, args: argparse.Namespace) -> None:
        """Check the final arguments; MindSpeed calls this for every feature, enabled or not."""
        settings = LaunchSettings(args)
        settings.check(complete=True)
        if settings.options.use_commfuse and settings.tensor == 1 and not settings.elsewhere:
            raise IncompatibleOptionsError(
                "--use-commfuse needs --tensor-model-parallel-size of at least 2: a group of one "
                "transfers nothing; choose that, add --commfuse-dp with "
                "--use-distributed-optimizer for gradients and parameters, or --commfuse-ulysses "
                "with --context-parallel-algo ulysses_cp_algo, or leave --use-commfuse out"
            )
        if _given(args, "commfuse_overlap"):
            check_compatible(args, _OVERLAPPED)

    def _do_nothing(self, *args: Any) -> None:
        """Take the place of MindSpeed's other hooks."""

    pre_register_patches = pre_validate_args = post_validate_args = _do_nothing


def _given(args: argparse.Namespace, flag: str) -> bool:
    """Whether a flag is given, by its attribute."""
    return bool(getattr(args, flag, None))


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _norm_column() -> str | None:
    """MindSpeed's column-parallel layer with norm, whose name depends on the branch, if any."""
    if not _has_module(_NORM_LAYERS):
        return None
    layers = importlib.import_module(_NORM_LAYERS)
    name = next(filter(functools.partial(hasattr, layers), _NORM_COLUMNS), None)
    return name and f"{_NORM_LAYERS}.{name}"


def _use_mindspeeds_matmul_add() -> None:
    """On NPUs, accumulate weight gradients with the op that MindSpeed uses in unfused layers."""
    try:
        ops = importlib.import_module("mindspeed.ops.npu_matmul_add")
    except ModuleNotFoundError as error:
        _logger.info("CommFuse accumulates weight gradients in plain torch: %s", error)
        return
    fp32 = getattr(ops, "npu_matmul_add_fp32", None)
    if fp32 is not None and not os.environ.get("ATB_HOME_PATH"):
        # Every rank would compile the op in its first backward, and fail.
        _logger.warning(
            "ATB_HOME_PATH is unset, and MindSpeed's matmul-add needs ATB: CommFuse accumulates "
            "weight gradients in plain torch, which is slower; install NNAL and source its "
            "atb/set_env.sh"
        )
        fp32 = None
    use_matmul_add(fp32=fp32, sixteen_bits=getattr(ops, "npu_matmul_add_fp16", None))
