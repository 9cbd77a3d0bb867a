"""``--use-commfuse`` as a feature of MindSpeed.

MindSpeed calls the hooks of a feature in this order (read in its sources and run on CPU):
``register_args`` on an early parser; ``pre_register_patches`` and ``register_patches`` if the flag
is set; ``register_args`` again on Megatron's parser; then, with or without the flag,
``pre_validate_args``, Megatron's own checks, ``post_validate_args`` and ``validate_args``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
from typing import Any

from commfuse_npu.kernels import use_matmul_add
from commfuse_npu.options import DEFAULTS, add_arguments, given_options
from commfuse_npu.refusals import IncompatibleOptionsError
from mindspeed_patches.patching import Feature
from mindspeed_patches.training_options import LaunchSizes, check_options, register_wrappers
from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["CommFuseFeature"]

_logger = logging.getLogger(__name__)


class CommFuseFeature(Feature):
    """Fuses tensor-parallel linear layers and, on request, attention, Ulysses and data parallelism.

    Attributes:
        wrappers: the linear wrappers with their call counts; ``None`` until patches are registered.
    """

    def __init__(self) -> None:
        super().__init__("use-commfuse")
        self.wrappers: LinearWrappers | None = None

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title="commfuse")
        add_arguments(group)
        group.set_defaults(**DEFAULTS)

    def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
        """Wrap the selected layers, the set-up of process groups, and the creation of the model.

        Raises what :func:`~.training_options.check_options` raises.
        """
        check_options(args)
        engine = getattr(args, "transformer_impl", "transformer_engine") == "transformer_engine"
        self.wrappers, users, report = register_wrappers(
            patch_manager,
            args,
            # Its own column-parallel layer with norm may then replace Megatron's layer.
            transformer_engine=engine
            and _has_module("mindspeed.te.pytorch.module.layernorm_column_parallel_linear"),
        )
        for user in users:
            user.register_lanes(patch_manager)
        if _has_module("megatron.training"):  # Megatron core alone builds no model
            report.register(patch_manager)
        _use_mindspeeds_matmul_add()

    def validate_args(self, args: argparse.Namespace) -> None:
        """Check the final arguments; MindSpeed calls this for every feature, enabled or not."""
        check_options(args, complete=True)
        if not getattr(args, self.feature_name, None):
            return
        level = getattr(args, "optimization_level", self.optimization_level)
        if level < self.optimization_level:
            raise IncompatibleOptionsError(
                f"--use-commfuse and --optimization-level {level} exclude each other: level "
                f"{level} leaves features of level {self.optimization_level} out; leave one of the "
                "two out"
            )
        elsewhere = given_options(args).commfuse_ulysses or given_options(args).commfuse_dp
        if LaunchSizes(args).tensor == 1 and not elsewhere:
            raise IncompatibleOptionsError(
                "--use-commfuse needs --tensor-model-parallel-size of at least 2: a group of one "
                "transfers nothing; choose that, add --commfuse-dp with "
                "--use-distributed-optimizer for gradients and parameters, or --commfuse-ulysses "
                "with --context-parallel-algo ulysses_cp_algo, or leave --use-commfuse out"
            )


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


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
