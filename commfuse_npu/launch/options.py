"""The options of CommFuse, declared once for all parsers.  Imports no torch.

MindSpeed's parsers, the CPU pretraining and ``commfuse-npu plan`` read this table.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from commfuse_npu.launch.did_you_mean import did_you_mean
from commfuse_npu.plan import Schedule, default_shape
from commfuse_npu.plan.schedule import Shape
from commfuse_npu.removed import REMOVED, RENAMED, removed

LAYERS = (
    *("qkv", "q_down", "q_up", "kv_down", "kv_up", "proj"),
    *("fc1", "fc2", "shared_fc1", "shared_fc2", "eh_proj", "output"),
)
"""The names of linear layers that ``--commfuse-layers`` accepts."""


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A converter for a whole number from ``least`` to ``most``; unbounded by default."""
    span = f"from {least}" + (f" to {most}" if most is not None else "")

    def convert(text: str) -> int:
        # No number of this project has more digits, and int() accepts at most 4,300.
        digits = text.removeprefix("-")
        number = int(text) if digits.isdecimal() and len(digits) <= 18 else None
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number {span}")
        return number

    return convert


def words(text: str) -> tuple[str, ...]:
    """Convert a comma-separated list."""
    parsed = tuple(word.strip() for word in text.split(",") if word.strip())
    if not parsed:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty list; give one word at least")
    return parsed


def words_from(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A converter for a comma-separated list of these words."""

    def convert(text: str) -> tuple[str, ...]:
        for word in (parsed := words(text)):
            if word not in known:
                raise argparse.ArgumentTypeError(
                    f"{word!r} is unknown; choose from {', '.join(known)}"
                    f"{did_you_mean(word, known)}"
                )
        return parsed

    return convert


Declared = tuple[Any, dict[str, Any]]
"""The default of an option, and the keywords of ``add_argument``."""


def _option(default: Any, help: str, **keywords: Any) -> Declared:
    if isinstance(default, bool):
        keywords.setdefault("action", argparse.BooleanOptionalAction)
    return default, {"help": help, **keywords}


OPTIONS: dict[str, Declared] = {
    "use_commfuse": _option(False, "fuse the tensor-parallel linears"),
    "commfuse_layers": _option(LAYERS, f"which, from {','.join(LAYERS)}", type=words_from(LAYERS)),
    "commfuse_lanes": _option(
        None,
        "transfers in flight, a batch per peer; by default tensor-parallel groups of three or more "
        "inside a node send each chunk as one collective, others have a lane per peer, up to 7",
        type=whole(1),
    ),
    "commfuse_chunks": _option(
        None,
        "sub-blocks per block, which fuses blocks of any length; by default, in tensor-parallel "
        "layers, 2 if a block is long enough for what a post costs the host (2048 rows of 4096 at "
        "128 us), else 1; on NPUs in configs/hardware shorter blocks keep Megatron's code",
        type=whole(1),
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
    "commfuse_attention": _option(
        False, "fuse attention with the projection of its output (needs proj among the layers)"
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
    "commfuse_order_log": _option(
        None,
        "write what each rank posts and waits for, in order, for commfuse-npu verify --log",
        metavar="FOLDER",
    ),
}
"""``--use-commfuse`` and its options, by the attribute in a namespace."""

OVERLAP_OPTIONS: dict[str, Declared] = {
    "commfuse_overlap": _option(
        False,
        "overlap transfers with other passes: the forward of another micro-batch, recomputations "
        "ahead of their gradients, weight gradients; the same bits",
        action="store_true",
    ),
    "commfuse_overlap_memory": _option(
        False,
        "run forwards beside backwards in a pipeline without virtual stages, too, where a stage "
        "then holds the activations of up to twice as many micro-batches",
        action="store_true",
    ),
    "commfuse_overlap_check": _option(
        False,
        "run the micro-batches of the second step in Megatron's order, too, and compare the bits "
        "of all gradients",
        action="store_true",
    ),
}
"""The options of overlap, which does not need ``--use-commfuse``."""

DEFAULTS = {name: default for name, (default, _) in OPTIONS.items()}
"""The value of each of :data:`OPTIONS` where it is not given."""


def option_name(attribute: str) -> str:
    """``use_commfuse`` to ``--use-commfuse``."""
    return f"--{attribute.replace('_', '-')}"


def add_arguments(
    parser: argparse._ActionsContainer, options: Mapping[str, Declared] = OPTIONS
) -> None:
    """Declare options without defaults; set :data:`DEFAULTS` on the parser if needed.

    Removed options are refused with what to use in their place.
    """
    for name, (_, keywords) in options.items():
        parser.add_argument(option_name(name), **keywords)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    attributes = {option_name(name): name for name in options}
    for old, new in RENAMED.items():
        if new in attributes:
            dest = attributes[new]
            parser.add_argument(old, action=_Renamed, dest=dest, nargs=0, const=new, **hidden)
    for name in REMOVED:
        if name.startswith("--"):
            parser.add_argument(name, type=_refusal(name), **hidden)


def _refusal(name: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        raise argparse.ArgumentTypeError(removed(name))

    return convert


class _Renamed(argparse.Action):
    """The old name of a flag; ``const`` is the new one."""

    def __call__(
        self, _: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        warnings.warn(f"{option} is now {self.const}", FutureWarning, stacklevel=2)
        setattr(namespace, self.dest, True)


def given_options(args: argparse.Namespace) -> argparse.Namespace:
    """:data:`OPTIONS` of a namespace, with the default of each that it lacks."""
    given = {name: getattr(args, name, None) for name in OPTIONS}
    return argparse.Namespace(
        **{name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    )


def keeps_short_blocks(options: argparse.Namespace) -> bool:
    """Whether short blocks keep Megatron's order; given chunks, or tuning, fuse any length."""
    return options.commfuse_chunks is None and options.commfuse_tuning != "on"


def schedule_for(
    options: argparse.Namespace,
    size: int,
    processes: int,
    stride: int = 1,
    chunks: int = 1,
    lanes: int | None = None,
    linear: bool = False,
) -> Schedule:
    """The schedule of the options, for a group of ``size`` ranks.

    Its shape is ``two_level`` if the group has several ranks on each of several nodes.  For linear
    layers of a group inside a node it is :func:`~commfuse_npu.plan.default_shape`, unless
    ``--commfuse-lanes``, tuning or the fused attention needs lanes.  Otherwise it is ``shifted``.
    There are at most ``size - 1`` lanes, as each costs buffers on every rank and no more transfers
    are in flight.

    Args:
        processes: ranks per node.
        stride: distance in global ranks between neighbors in the group: 1 for tensor parallelism,
            the tensor-parallel size for context and data parallelism.
        chunks, lanes: defaults if the options do not set them.
        linear: whether the schedule is for tensor-parallel layers.

    Raises:
        PlanError: the options do not make a valid schedule.
    """
    local = size if processes % stride else processes // stride
    tuned = options.commfuse_tuning == "on"
    needs_lanes = options.commfuse_lanes or options.commfuse_attention or tuned
    shape: Shape = "shifted"
    if 1 < local < size and size % local == 0:
        shape = "two_level"
    elif linear and local >= size and not needs_lanes:
        shape = default_shape(size)
    schedule = Schedule(
        shape=shape,
        lanes=options.commfuse_lanes or lanes,
        chunks=options.commfuse_chunks or chunks,
        node_size=local if shape == "two_level" else None,
    )
    return replace(schedule, lanes=min(schedule.lanes_for(size), max(1, size - 1)))


def unknown_option(words: Sequence[str]) -> str:
    """A message about the first unknown or removed option of CommFuse in ``words``; else empty."""
    names = [option_name(name) for name in (*OPTIONS, *OVERLAP_OPTIONS)]
    names += RENAMED
    names += [f"--no-{name.removeprefix('--')}" for name in names]
    for word in words:
        name = word.partition("=")[0]
        if why := removed(name):
            return why
        if name.startswith(("--commfuse", "--use-commfuse", "--no-commfuse")) and name not in names:
            return f"unknown: {name}{did_you_mean(name, names, 0.0)}"
    return ""
