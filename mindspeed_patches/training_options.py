"""Typed settings of a training, from the CommFuse options (:mod:`commfuse_npu.options`)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch

from commfuse_npu.ops import BucketOptions, LinearOptions
from commfuse_npu.options import typed_options
from commfuse_npu.plan import DATA_PARALLEL_LANES, default_chunks
from commfuse_npu.refusals import REFUSALS_OF, Needs, missing
from commfuse_npu.tuning import Tuning, default_folder
from mindspeed_patches.data_parallel import OPTIONS
from mindspeed_patches.layout import (
    data_parallel_size,
    hidden_size,
    parallel_size,
    rows_of_blocks,
    schedule_here,
)
from mindspeed_patches.refusals import IncompatibleOptionsError, check_compatible

__all__ = ["CommFuseOptions", "checked_options", "commfuse_options", "complete_options"]


@dataclass(frozen=True)
class CommFuseOptions:
    """The settings that the options select.

    Attributes:
        linear: options of the fused linear layers.
        rows, hidden: shape of a block in this launch; ``None`` if the arguments do not give it.
        limited: layers whose blocks are so short that Megatron's order is faster keep it.
        layers: names of the layers to fuse.
        attention: fuse attention with its output projection.
        ulysses: options of attention under Ulysses context parallelism; ``None``: not fused.
        data_parallel: options of the distributed optimizer's buckets; ``None``: not fused.
        order_log: the folder in which the order of transfers is recorded; ``None`` for no record.
    """

    linear: LinearOptions
    rows: int | None
    hidden: int | None
    limited: bool
    layers: tuple[str, ...]
    attention: bool
    ulysses: LinearOptions | None
    data_parallel: BucketOptions | None
    order_log: str | None


def commfuse_options(args: argparse.Namespace) -> CommFuseOptions:
    """Read the options from a namespace of strings (before Megatron parses them) or final values.

    Raises:
        ValueError: a value is invalid; the message names the option.
    """
    options = typed_options(args)
    if options.commfuse_attention and "proj" not in options.commfuse_layers:
        raise ValueError(
            f"--commfuse-attention needs proj among --commfuse-layers "
            f"{','.join(options.commfuse_layers)}: it is fused with the output projection; add it"
        )
    tuned = options.commfuse_tuning == "on"
    if tuned and (options.commfuse_chunks, options.commfuse_taper) != (None, 1):
        raise ValueError(
            f"--commfuse-tuning on chooses the chunks itself, and --commfuse-chunks "
            f"{options.commfuse_chunks} --commfuse-taper {options.commfuse_taper:g} name them; "
            "leave one or the other out"
        )
    tensor_parallel = parallel_size(args, "tensor_model")
    rows, hidden = rows_of_blocks(args), hidden_size(args)
    chunks = 1 if tuned or rows is None else default_chunks(tensor_parallel, rows, hidden)
    ulysses = buckets = None
    if options.commfuse_ulysses:
        across = schedule_here(options, parallel_size(args, "context"), tensor_parallel)
        ulysses = LinearOptions(across, wgrad=options.commfuse_wgrad)
    if options.commfuse_dp:
        # Megatron orders ranks with pipeline stages last, or before data parallelism.
        stages_first = getattr(args, "use_tp_pp_dp_mapping", None)
        inner = tensor_parallel * (parallel_size(args, "pipeline_model") if stages_first else 1)
        buckets = replace(
            OPTIONS,
            schedule=schedule_here(
                options, data_parallel_size(args), inner, lanes=DATA_PARALLEL_LANES
            ),
            reduce_dtype=_dtype(options.commfuse_dp_reduce_dtype),
        )
    return CommFuseOptions(
        linear=LinearOptions(
            schedule=schedule_here(options, tensor_parallel, chunks=chunks, linear=True),
            keep_gathered=options.commfuse_keep_gathered,
            reduce_dtype=_dtype(options.commfuse_reduce_dtype),
            wgrad=options.commfuse_wgrad,
            tuning=Tuning(str(default_folder())) if tuned else None,
        ),
        rows=rows,
        hidden=hidden,
        # An explicit number of chunks, or tuning, already determines how blocks are cut.
        limited=not tuned and options.commfuse_chunks is None,
        layers=options.commfuse_layers,
        attention=options.commfuse_attention,
        ulysses=ulysses,
        data_parallel=buckets,
        order_log=options.commfuse_order_log,
    )


def checked_options(args: argparse.Namespace, *, complete: bool = False) -> CommFuseOptions:
    """:func:`commfuse_options`, after checking them against the other options known so far.

    Args:
        complete: ``args`` are the final arguments, so required options must be present.

    Raises:
        IncompatibleOptionsError: another option excludes them, or a required one is missing.
        ValueError: a value is invalid.
    """
    check_compatible(args)
    options = commfuse_options(args)
    needs = Needs(
        parallel_size(args, "tensor_model"),
        parallel_size(args, "context"),
        bool(getattr(args, "use_distributed_optimizer", None)),
        getattr(args, "context_parallel_algo", None),
        getattr(args, "num_attention_heads", None),
        getattr(args, "seq_length", None),
    )
    for ours, option in (
        ("--commfuse-attention", options.attention),
        ("--commfuse-ulysses", options.ulysses),
        ("--commfuse-dp", options.data_parallel),
    ):
        if option:
            check_compatible(args, REFUSALS_OF[ours])
            if complete and (lacks := missing(ours, needs)):
                raise IncompatibleOptionsError(lacks)
    return options


def complete_options(args: argparse.Namespace) -> CommFuseOptions:
    """:func:`checked_options` of the final arguments."""
    return checked_options(args, complete=True)


def _dtype(name: str) -> torch.dtype | None:
    return torch.float32 if name == "float32" else None
