"""Checks the CommFuse options of a launch, and registers the wrappers that they select.

The options are declared in :mod:`commfuse_npu.options`.  At patch time Megatron's own options exist
only if given, as strings; at validation all arguments are final.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from commfuse_npu.ops import LinearOptions
from commfuse_npu.options import given_options, keeps_short_blocks
from commfuse_npu.plan import DATA_PARALLEL_LANES, default_chunks
from commfuse_npu.refusals import IncompatibleOptionsError, check_compatible, missing
from commfuse_npu.tuning import Tuning, default_folder
from mindspeed_patches.attention import AttentionWrappers
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.lanes import LaneUser
from mindspeed_patches.layout import (
    data_parallel_size,
    hidden_size,
    parallel_size,
    rows_of_blocks,
    schedule_here,
)
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.ulysses import MINDSPEED_ULYSSES, UlyssesWrappers
from mindspeed_patches.wrappers import LinearWrappers

__all__ = [
    "bucket_options",
    "check_options",
    "linear_options",
    "register_wrappers",
    "ulysses_options",
]


def check_options(args: argparse.Namespace, *, complete: bool = False) -> None:
    """Check the options of CommFuse and those that exclude them, as far as ``args`` has them.

    Args:
        complete: ``args`` are the final arguments, so required options must be present.

    Raises:
        IncompatibleOptionsError: another option excludes them, or a required one is missing.
        ValueError: values contradict each other.
    """
    options = given_options(args)
    asked = [name for name in ("attention", "ulysses", "dp") if vars(options)[f"commfuse_{name}"]]
    if not options.use_commfuse:
        for name in asked:
            raise IncompatibleOptionsError(
                f"--commfuse-{name} needs --use-commfuse, which switches CommFuse on; add it, or "
                f"leave --commfuse-{name} out"
            )
        return
    check_compatible(args)
    if options.commfuse_attention and "proj" not in options.commfuse_layers:
        raise ValueError(
            f"--commfuse-attention needs proj among --commfuse-layers "
            f"{','.join(options.commfuse_layers)}: it is fused with the output projection; add it"
        )
    given = options.commfuse_chunks, options.commfuse_taper
    if options.commfuse_tuning == "on" and given != (None, 1):
        raise ValueError(
            f"--commfuse-tuning on chooses the chunks itself, and --commfuse-chunks "
            f"{options.commfuse_chunks} --commfuse-taper {options.commfuse_taper:g} name them; "
            "leave one or the other out"
        )
    linear_options(args)  # checks the schedule
    for name in asked:
        check_compatible(args, f"--commfuse-{name}")
        if complete and (lacks := missing(f"--commfuse-{name}", args)):
            raise IncompatibleOptionsError(lacks)


def linear_options(args: argparse.Namespace) -> LinearOptions:
    """The options of the tensor-parallel linear layers."""
    options = given_options(args)
    size, rows = parallel_size(args, "tensor_model"), rows_of_blocks(args)
    tuned = options.commfuse_tuning == "on"
    chunks = 1 if tuned or rows is None else default_chunks(size, rows, hidden_size(args))
    return LinearOptions(
        schedule=schedule_here(options, size, chunks=chunks, linear=True),
        reduce_dtype=_dtype(options.commfuse_reduce_dtype),
        wgrad=options.commfuse_wgrad,
        tuning=Tuning(str(default_folder())) if tuned else None,
    )


def ulysses_options(args: argparse.Namespace) -> LinearOptions:
    """The options of attention under Ulysses context parallelism and of its projections."""
    options = given_options(args)
    stride = parallel_size(args, "tensor_model")
    schedule = schedule_here(options, parallel_size(args, "context"), stride)
    return LinearOptions(schedule)


def bucket_options(args: argparse.Namespace) -> LinearOptions:
    """The options of the distributed optimizer's buckets."""
    options = given_options(args)
    # Megatron orders ranks with pipeline stages last, or before data parallelism.
    stages_first = getattr(args, "use_tp_pp_dp_mapping", None)
    stride = parallel_size(args, "tensor_model")
    stride *= parallel_size(args, "pipeline_model") if stages_first else 1
    ranks = data_parallel_size(args)
    schedule = schedule_here(options, ranks, stride, lanes=DATA_PARALLEL_LANES)
    return LinearOptions(schedule, reduce_dtype=_dtype(options.commfuse_dp_reduce_dtype))


def register_wrappers(
    manager: Any,
    args: argparse.Namespace,
    *,
    transformer_engine: bool = False,
    ulysses_attention: str = MINDSPEED_ULYSSES,
) -> tuple[LinearWrappers, Sequence[LaneUser], StartReport]:
    """Register with MindSpeed's patch manager, or with our stand-in.

    Args:
        args: with options that :func:`check_options` accepts.
        transformer_engine: see :meth:`LinearWrappers.register`.
        ulysses_attention: dotted path of the class whose forward exchanges heads.

    Returns:
        The linear wrappers, which count all calls; the wrappers whose lanes are to be created once
        Megatron's groups exist; the report to print when the model is built.
    """
    options = given_options(args)
    wrappers = LinearWrappers(
        linear_options(args),
        options.commfuse_layers,
        limited=keeps_short_blocks(options),
        rows=rows_of_blocks(args),
        hidden=hidden_size(args),
    )
    users: list[LaneUser] = []
    elsewhere = options.commfuse_ulysses or options.commfuse_dp
    if parallel_size(args, "tensor_model") > 1 or not elsewhere:
        wrappers.register(manager, transformer_engine=transformer_engine)
        if options.commfuse_attention:
            AttentionWrappers(wrappers).register(manager)
        users.append(wrappers)
    if options.commfuse_ulysses:
        ulysses = UlyssesWrappers(wrappers, ulysses_options(args))
        ulysses.register(manager, ulysses_attention)
        users.append(ulysses)
    buckets = None
    if options.commfuse_dp:
        buckets = BucketWrappers(wrappers, bucket_options(args))
        buckets.register(manager)
        users += buckets.users.values()
    for user in users:
        user.order_log = options.commfuse_order_log
    report = StartReport(
        wrappers,
        attention=options.commfuse_attention,
        ulysses=options.commfuse_ulysses,
        buckets=buckets,
    )
    return wrappers, users, report


def _dtype(name: str) -> torch.dtype | None:
    return torch.float32 if name == "float32" else None
