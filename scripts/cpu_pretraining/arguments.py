"""The command line of the CPU pretraining, with Megatron's option names where they exist.

Whatever can be checked without ranks is checked here: a mistake then costs a second instead of a
hanging collective.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from commfuse_npu.launch.options import DEFAULTS, OPTIONS, OVERLAP_OPTIONS, add_arguments, whole
from commfuse_npu.launch.refusals import IncompatibleOptionsError
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.model_config import ModelConfig, indivisible, problems
from commfuse_npu.tools.option_types import Parser, positive
from mindspeed_patches.training_options import LaunchSettings

from .compare import forms

_TABLE: dict[str, tuple[tuple[str, Any, Any, str], ...]] = {
    "parallel layout": (
        ("tensor-model-parallel-size", 2, whole(1), "ranks per layer (TP)"),
        ("context-parallel-size", 1, whole(1), "ranks per sequence, by Ulysses (CP)"),
        ("data-parallel-size", 1, whole(1), "replicas (DP); TP * CP * DP processes are started"),
        ("distributed-timeout-minutes", 5, whole(1), "for a collective and for a transfer"),
        ("link-rate", None, positive,
         "MB/s of each pair of ranks and direction, by pacing the connections: a wire to hide "
         "(Linux only; else the loopback as it is). Layers that are not fused pay more than their "
         "due: gloo's reduce-scatter sends an all-reduce's bytes"),
    ),
    "model": (
        ("num-layers", 4, whole(1), "transformer layers"),
        ("hidden-size", 256, whole(1), "features"),
        ("ffn-hidden-size", 704, whole(1), "width of the SwiGLU layer"),
        ("num-attention-heads", 8, whole(1), "query heads"),
        ("num-query-groups", 4, whole(1), "key/value heads"),
        ("seq-length", 256, whole(2), "tokens per sample"),
        ("recompute", False, bool, "full recompute, uniform, one layer each"),
        ("gradient-accumulation-fusion", True, bool, "add weight gradients to fp32 buffers"),
    ),
    "training": (
        ("micro-batch-size", 4, whole(1), "samples of a forward"),
        ("global-batch-size", 8, whole(1), "samples of an iteration"),
        ("train-iters", 160, whole(1), "iterations"),
        ("lr", 0.002, positive, "after the warm-up, a 25th of the run; falls to a tenth"),
        ("use-distributed-optimizer", False, bool, "its state sharded over the replicas"),
        ("seed", 1234, whole(0), "of weights and samples"),
    ),
    "output": (
        ("output", Path("runs"), Path, "folder of the picture and the trace of --compare"),
        ("compare", False, None, "train forms in turns; exit 1 unless overlap keeps every bit"),
        ("plain", False, None,
         "the plain form of what would be fused: collectives and GEMMs one after the other"),
        ("bf16", False, None,
         "9 times as long as fp32 without AVX512-BF16 or AMX, 0.7 times with it (measured)"),
    ),
}  # fmt: skip
"""By group: name, default, type and help of an option; one without a type is a flag."""


def _parser() -> Parser:
    parser = Parser(
        prog="cpu_pretraining",
        description="Pretrain a Llama on CPU with Megatron-Core and tensor parallelism over gloo.",
        epilog="@FILE is replaced by the options in a file, one word a line.",
        fromfile_prefix_chars="@",
    )
    for title, options in _TABLE.items():
        group = parser.add_argument_group(title)
        for name, default, kind, text in options:
            words: dict[str, Any] = {"type": kind}
            if isinstance(default, bool):
                words = {"action": argparse.BooleanOptionalAction if kind else "store_true"}
            elif default is not None:
                text += f" ({default})"
            group.add_argument(f"--{name}", default=default, help=text, **words)
    group.add_argument("--fp32", dest="bf16", action="store_false")
    flags = "commfuse_overlap", "commfuse_overlap_check"
    overlap = {name: OVERLAP_OPTIONS[name] for name in flags}
    add_arguments(parser.add_argument_group("CommFuse"), OPTIONS | overlap)
    parser.set_defaults(**DEFAULTS | {"use_commfuse": True})
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this run, complete and consistent; more sizes follow from them.

    Raises:
        UsageError: the options do not fit each other.
        SystemExit: an option is unknown or out of range; the error has been printed.
    """
    args = _parser().parse_args(argv)
    tp = args.tensor_model_parallel_size
    dp = args.data_parallel_size
    args.world_size = tp * args.context_parallel_size * dp
    args.sequence_parallel = tp > 1  # Megatron refuses it if there is nothing to split
    args.context_parallel_algo = "ulysses_cp_algo"
    args.min_lr = args.lr / 10
    if args.recompute:
        args.recompute_granularity = "full"
        args.recompute_method = "uniform"
        args.recompute_num_layers = 1
    try:
        LaunchSettings(args).check(complete=True)
    except (IncompatibleOptionsError, ValueError) as error:
        raise UsageError(str(error)) from error
    for why in (*_not_divisible(args), *_contradictions(args)):
        raise UsageError(why)
    args.num_microbatches = args.global_batch_size // (args.micro_batch_size * dp)
    return args


def _not_divisible(args: argparse.Namespace) -> Iterator[str]:
    names = {field.name for field in fields(ModelConfig)} & vars(args).keys()
    sizes = {name: getattr(args, name) for name in names}
    rest = {"vocab_size": 1, "max_position_embeddings": args.seq_length}
    by = "2 (rotary) times --num-attention-heads"
    yield from indivisible("--hidden-size", args.hidden_size, by, 2 * args.num_attention_heads)
    yield from problems(ModelConfig(**sizes, **rest, npus_per_node=args.world_size))


def _contradictions(args: argparse.Namespace) -> Iterator[str]:
    elsewhere = args.commfuse_ulysses or (args.commfuse_dp and args.data_parallel_size > 1)
    if args.plain and (args.compare or not args.use_commfuse):
        yield ("--plain is the plain form of what would be fused, which --compare trains by "
               "itself; choose --use-commfuse, and leave --compare out")  # fmt: skip
    if args.compare and args.tensor_model_parallel_size == 1 and not elsewhere:
        yield ("--compare has nothing to compare at --tensor-model-parallel-size 1, where no layer "
               "transfers anything; choose 2 or more, --commfuse-ulysses with context parallelism, "
               "or --commfuse-dp with --data-parallel-size of at least 2")  # fmt: skip
    if args.compare and len(forms(args)) == 1:
        yield ("--compare has nothing to compare with Megatron's own layers; leave "
               "--no-use-commfuse out, or add --commfuse-overlap")  # fmt: skip
    if args.link_rate is not None and args.world_size == 1:
        yield (f"--link-rate {args.link_rate:g} needs links, but there is 1 process; choose "
               "--tensor-model-parallel-size 2 or more, or leave --link-rate out")  # fmt: skip
