"""The options of CommFuse, for every parser that takes them, and what they mean.

The same options serve MindSpeed's parser and the CPU pretraining.  MindSpeed parses twice: once
early, when options that it does not know yet arrive as plain strings, and once for real.
:func:`commfuse_options` reads either.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from commfuse_npu import Schedule
from commfuse_npu.ops import BucketOptions, LinearOptions
from commfuse_npu.plan import DATA_PARALLEL_LANES, usual_chunks
from commfuse_npu.tuning import Tuning, default_folder
from mindspeed_patches.data_parallel import OPTIONS
from mindspeed_patches.layout import hidden_size, parallel_size, rows_of_blocks
from mindspeed_patches.refusals import (
    ATTENTION_REFUSALS,
    DATA_PARALLEL_REFUSALS,
    FLOW_REFUSALS,
    ULYSSES_REFUSALS,
    check_compatible,
    check_data_parallel,
    check_flow_layout,
    check_ulysses_layout,
)
from mindspeed_patches.wrappers import LAYERS

__all__ = [
    "DEFAULTS",
    "CommFuseOptions",
    "add_arguments",
    "checked_options",
    "commfuse_options",
    "complete_options",
    "schedule_for",
]


def whole(minimum: int) -> Callable[[str], int]:
    """A converter for argparse: a whole number of at least ``minimum``."""

    def convert(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
        return value

    convert.__name__ = f"whole number >= {minimum}"
    return convert


def _number_or(*words: str, minimum: int = 1) -> Callable[[str], int | str]:
    """A converter for argparse: a whole number of at least ``minimum``, or one of some words."""

    def convert(text: str) -> int | str:
        if text in words:
            return text
        try:
            return whole(minimum)(text)
        except ValueError as error:
            choices = ", ".join(words)
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a whole number nor one of {choices}"
            ) from error

    return convert


def _layer_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in LAYERS:
            raise argparse.ArgumentTypeError(
                f"unknown layer {name!r}; choose from {','.join(LAYERS)}"
            )
    if not names:
        raise argparse.ArgumentTypeError("no layer named; leave --use-commfuse out to fuse none")
    return names


def _option(default: Any, help: str | None = None, **keywords: Any) -> tuple[Any, dict[str, Any]]:
    """What an option is when it is not given, and how argparse takes it."""
    if isinstance(default, bool):
        keywords["action"] = argparse.BooleanOptionalAction
    return default, {"help": help, **keywords}


_OPTIONS = {
    "use_commfuse": _option(False, "fuse the tensor-parallel linears"),
    "commfuse_layers": _option(LAYERS, f"which, from {','.join(LAYERS)}", type=_layer_names),
    "commfuse_schedule": _option(
        "auto",
        "auto: two_level if a tensor-parallel group spans nodes, else shifted",
        choices=("auto", "shifted", "two_level"),
    ),
    "commfuse_lanes": _option(
        None, "transfers in flight; by default one per peer, up to 7", type=whole(1)
    ),
    "commfuse_chunks": _option(
        None,
        "sub-blocks per block; by default, in tensor-parallel layers, 2 from 2^22 numbers per "
        "block on (1024 rows of 4096; with two ranks 1024 rows), else 1",
        type=whole(1),
    ),
    "commfuse_taper": _option(
        1.0, "each sub-block is so many times as long as the next to arrive", type=float
    ),
    "commfuse_collectives_from": _option(
        "auto",
        "column-parallel layers with so many outputs per rank, or more, keep Megatron's "
        "collectives in their backward, whose GEMMs hide them; auto: from the description of this "
        "NPU; never",
        type=_number_or("auto", "never"),
        metavar="OUTPUTS",
    ),
    "commfuse_tuning": _option(
        "off",
        "on: find the fastest sub-blocks and lanes, or the plain path, at the first use of a "
        "shape, and remember it on disk; off: as given, the same in every run",
        choices=("off", "on"),
    ),
    "commfuse_reduce_dtype": _option(
        "none", "float32: add partial sums in fp32 and round once", choices=("none", "float32")
    ),
    "commfuse_wgrad": _option(
        "whole",
        "blocks: row-parallel layers make one per arriving block, other rounding",
        choices=("whole", "blocks"),
    ),
    "commfuse_keep_gathered": _option(False, "more memory, no re-gather"),
    "commfuse_attention": _option(
        False, "fuse attention with the projection of its output (needs proj among the layers)"
    ),
    "commfuse_flow": _option(
        None,
        "cut the sequence into so many chunks that flow through whole layers, each chunk's "
        "transfers behind the work on the others",
        type=whole(2),
        metavar="CHUNKS",
    ),
    "commfuse_ulysses": _option(
        False,
        "fuse attention and its projections with the exchange of heads (needs Ulysses context "
        "parallelism)",
    ),
    "commfuse_dp": _option(
        False,
        "exchange gradients and parameters of the distributed optimizer by point-to-point "
        "transfers, too",
    ),
    "commfuse_dp_reduce_dtype": _option(
        "none",
        "float32: add the ranks' gradients in fp32 and round once, other bits than the collective",
        choices=("none", "float32"),
    ),
    "commfuse_min_rows": _option(
        "auto",
        "layers whose block per rank has fewer rows (tokens) stay Megatron's; auto: on an NPU that "
        "is described 2^19 numbers per rank (at TP 8 1024 rows of 4096), at least 256, unless "
        "chunks are given or tuned; 0: none stays",
        type=_number_or("auto", minimum=0),
        metavar="ROWS",
    ),
    "commfuse_allow_nothing": _option(
        False, "train although nothing would be fused, which is an error at the start otherwise"
    ),
    "commfuse_order_log": _option(
        None,
        "write what each rank posts and waits for, in order, for commfuse-npu verify --log",
        metavar="FOLDER",
    ),
}

DEFAULTS = {name: default for name, (default, _) in _OPTIONS.items()}
"""What an option is when it is not given."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the options, without defaults: set :data:`DEFAULTS` where they are wanted."""
    for name, (_, keywords) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)


@dataclass(frozen=True)
class CommFuseOptions:
    """What the options ask for.

    Attributes:
        linear: of the fused layers.
        described: set ``linear.collectives_from`` from the description of this NPU.
        rows, hidden: of this launch's blocks; ``None`` if it does not say.
        min_rows: layers whose block has fewer stay Megatron's; ``None``: as many as on this NPU
            Megatron's order is faster for.
        layers: names of the layers to fuse.
        attention: fuse attention with the projection of its output.
        flow: chunks of the sequence that flow through whole layers; ``None`` for none.
        ulysses: of attention under Ulysses context parallelism; ``None`` leaves it alone.
        data_parallel: of the distributed optimizer's buckets; ``None`` leaves them alone.
        order_log: the folder in which the order of transfers is recorded; ``None`` for nowhere.
        allow_nothing: train also where nothing is fused.
    """

    linear: LinearOptions
    described: bool
    rows: int | None
    hidden: int | None
    min_rows: int | None
    layers: tuple[str, ...]
    attention: bool
    flow: int | None
    ulysses: LinearOptions | None
    data_parallel: BucketOptions | None
    order_log: str | None
    allow_nothing: bool


def commfuse_options(args: argparse.Namespace) -> CommFuseOptions:
    """Read the options from a namespace, early (strings) or real.

    Raises:
        ValueError: a value does not fit; the message names the option.
    """
    given = _typed(args)
    if given.commfuse_attention and "proj" not in given.commfuse_layers:
        raise ValueError(
            f"--commfuse-attention needs proj among --commfuse-layers "
            f"{','.join(given.commfuse_layers)}: it is fused with the output projection; add it"
        )
    tuned = given.commfuse_tuning == "on"
    if tuned and (given.commfuse_chunks, given.commfuse_taper) != (None, 1):
        raise ValueError(
            f"--commfuse-tuning on finds the chunks itself, and --commfuse-chunks "
            f"{given.commfuse_chunks} --commfuse-taper {given.commfuse_taper:g} name them; leave "
            "one or the other out"
        )
    tensor_parallel = parallel_size(args, "tensor_model")
    rows, hidden = rows_of_blocks(args), hidden_size(args)
    chunks = 1 if tuned or rows is None else usual_chunks(tensor_parallel, rows, hidden)
    least, min_rows = given.commfuse_collectives_from, given.commfuse_min_rows
    if min_rows == "auto":
        # Who says how blocks are cut, or has it tried out, has chosen.
        min_rows = 0 if tuned or given.commfuse_chunks else None
    return CommFuseOptions(
        linear=LinearOptions(
            schedule=schedule_for(given, tensor_parallel, chunks=chunks),
            keep_gathered=given.commfuse_keep_gathered,
            reduce_dtype=_dtype(given.commfuse_reduce_dtype),
            wgrad=given.commfuse_wgrad,
            collectives_from=least if isinstance(least, int) else None,
            tuning=Tuning(str(default_folder())) if tuned else None,
        ),
        described=least == "auto",
        rows=rows,
        hidden=hidden,
        min_rows=min_rows,
        layers=given.commfuse_layers,
        attention=given.commfuse_attention,
        flow=given.commfuse_flow,
        ulysses=LinearOptions(
            schedule_for(given, parallel_size(args, "context"), stride=tensor_parallel),
            wgrad=given.commfuse_wgrad,
        )
        if given.commfuse_ulysses
        else None,
        data_parallel=_bucket_options(given, args) if given.commfuse_dp else None,
        order_log=given.commfuse_order_log,
        allow_nothing=given.commfuse_allow_nothing,
    )


def checked_options(args: argparse.Namespace) -> CommFuseOptions:
    """:func:`commfuse_options`, if nothing that is known so far excludes them.

    Raises:
        IncompatibleOptionsError: another option does.
        ValueError: a value does not fit.
    """
    check_compatible(args)
    options = commfuse_options(args)
    for asked, refusals in (
        (options.attention, ATTENTION_REFUSALS),
        (options.flow, FLOW_REFUSALS),
        (options.ulysses, ULYSSES_REFUSALS),
        (options.data_parallel, DATA_PARALLEL_REFUSALS),
    ):
        if asked:
            check_compatible(args, refusals)
    return options


def complete_options(args: argparse.Namespace) -> CommFuseOptions:
    """:func:`checked_options` of the real arguments, if what they need is there, too.

    Raises:
        IncompatibleOptionsError: also, something that they need is missing.
        ValueError: a value does not fit.
    """
    options = checked_options(args)
    if options.flow is not None:
        check_flow_layout(args, options.flow)
    if options.ulysses is not None:
        check_ulysses_layout(args)
    if options.data_parallel is not None:
        check_data_parallel(args)
    return options


def _dtype(name: str) -> torch.dtype | None:
    return torch.float32 if name == "float32" else None


def _bucket_options(given: argparse.Namespace, args: argparse.Namespace) -> BucketOptions:
    """Of the data-parallel group, context-parallel ranks included."""
    tensor_parallel = parallel_size(args, "tensor_model")
    stages = parallel_size(args, "pipeline_model")
    # Early the size of the job is known to the launcher only.
    world = int(getattr(args, "world_size", None) or os.environ.get("WORLD_SIZE") or 1)
    # Pipeline stages come last in Megatron's order of ranks, or before data parallelism.
    inner = tensor_parallel * (stages if getattr(args, "use_tp_pp_dp_mapping", None) else 1)
    size = max(1, world // (tensor_parallel * stages))
    return replace(
        OPTIONS,
        schedule=schedule_for(given, size, stride=inner, lanes=DATA_PARALLEL_LANES),
        reduce_dtype=_dtype(given.commfuse_dp_reduce_dtype),
    )


def _typed(args: argparse.Namespace) -> argparse.Namespace:
    """The CommFuse options of a namespace, converted from strings where need be."""
    values = dict(DEFAULTS)
    for name, (_, keywords) in _OPTIONS.items():
        value = getattr(args, name, None)
        if value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, str) and "type" in keywords:
            try:
                value = keywords["type"](value)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f"{option}: {error}") from error
        choices = keywords.get("choices", (value,))
        if value not in choices:
            raise ValueError(f"{option}: {value!r} is not one of {', '.join(choices)}")
        values[name] = value
    return argparse.Namespace(**values)


def schedule_for(
    given: argparse.Namespace,
    size: int,
    stride: int = 1,
    chunks: int = 1,
    lanes: int | None = None,
) -> Schedule:
    """The schedule that the options ask for, for a group of ``size`` ranks.

    ``auto`` is two_level if the group spans nodes, else shifted.  There are at most ``size - 1``
    transfers to have in flight, and each lane costs buffers on every rank: superfluous lanes are
    not made.

    Args:
        stride: from one rank of the group to the next: 1 for tensor parallelism, whose size it is
            for context and data parallelism.
        chunks, lanes: if the options ask for no number of them.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", size * stride))
    local = size if processes % stride else processes // stride
    spans_nodes = local < size and size % local == 0
    shape = given.commfuse_schedule
    if shape == "auto":
        shape = "two_level" if spans_nodes else "shifted"
    schedule = Schedule(
        shape=shape,
        lanes=given.commfuse_lanes or lanes,
        chunks=given.commfuse_chunks or chunks,
        taper=given.commfuse_taper,
        node_size=min(local, size) if shape == "two_level" else None,
    )
    return replace(schedule, lanes=min(schedule.lanes_for(size), max(1, size - 1)))
