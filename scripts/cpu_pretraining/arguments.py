"""The command line: Megatron's names where Megatron has one, defaults from a yaml file.

A value comes from the flag, else from the yaml file (`--config`, default
`configs/llama_tiny.yaml`), else it is an error: no default hides in the code. Everything that can
be checked without a process group is checked here, so that a mistake costs a second and not a
hanging collective.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from commfuse_npu.tools.config_file import ConfigError, read_config
from commfuse_npu.tools.option_types import page
from mindspeed_patches.arguments import add_arguments, complete_options, whole
from mindspeed_patches.refusals import IncompatibleOptionsError, check_flag

from .speed import WARM_UP_ITERATIONS
from .usage_error import UsageError, is_first_process

__all__ = ["parse_arguments"]

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = PROJECT_ROOT / "configs" / "llama_tiny.yaml"


class _Parser(argparse.ArgumentParser):
    """argparse that leaves the printing and the exit code to one place and to one rank."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")

    def print_help(self, file: Any = None) -> None:
        if is_first_process():
            super().print_help(file)


def _number(minimum: float, maximum: float = float("inf")) -> Any:
    def convert(text: str) -> float:
        value = float(text)
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not in [{minimum}, {maximum}]")
        return value

    convert.__name__ = f"number in [{minimum}, {maximum}]"
    return convert


def _link_rate(text: str) -> float:
    lowest, highest = 0.001, 100_000.0
    value = float(text)
    if not lowest <= value <= highest:
        raise argparse.ArgumentTypeError(
            f"{value:g} MB/s is not in [{lowest:g}, {highest:g}]; give 50, for example, or leave "
            "--link-rate out for the loopback as it is"
        )
    return value


def _backend(text: str) -> str:
    capable = dist.Backend.backend_capability
    if "cpu" not in capable.get(text, ()):
        known = ", ".join(sorted(name for name, devices in capable.items() if "cpu" in devices))
        raise argparse.ArgumentTypeError(
            f"{text!r} is no backend of CPU tensors that torch.distributed knows ({known}); "
            "choose gloo"
        )
    return text


_backend.__name__ = "backend"
_link_rate.__name__ = "number of megabytes per second"


def _run_name(text: str) -> str:
    if text in ("", ".", "..") or "/" in text or os.sep in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder name; use letters, digits, _-.")
    return text


def _data_path(text: str) -> str:
    # Path("") is the current folder.
    if not text or not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no file and no folder; give one with text, or leave --data-path out for "
            "Python's standard library"
        )
    return text


_data_path.__name__ = "path"


def _parser() -> _Parser:
    """All options. None has a default here: `argparse.SUPPRESS` leaves what was not typed out."""
    parser = _Parser(
        prog="torchrun --nproc_per_node N -m scripts.cpu_pretraining",
        description="Pretrain a Llama on CPU with Megatron-Core and tensor parallelism over gloo.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    flag = argparse.BooleanOptionalAction

    group = parser.add_argument_group("parallel layout")
    group.add_argument("--tensor-model-parallel-size", type=whole(1), help="ranks per layer (TP)")
    group.add_argument("--context-parallel-size", type=whole(1), help="ranks per sequence (CP)")
    group.add_argument(
        "--data-parallel-size", type=whole(1), help="replicas (DP); N = TP * CP * DP"
    )
    group.add_argument("--sequence-parallel", action=flag, help="off by itself when TP is 1")
    group.add_argument("--distributed-timeout-minutes", type=whole(1))
    group.add_argument(
        "--distributed-backend",
        type=_backend,
        help="gloo, or another one of CPU tensors that torch.distributed knows",
    )
    group.add_argument(
        "--link-rate",
        type=_link_rate,
        metavar="MB/S",
        help="megabytes per second of each pair of ranks and direction, by pacing the connections: "
        "a wire to hide (Linux only; default: loopback as it is). Layers that are not fused pay "
        "more than their due: gloo's reduce-scatter sends an all-reduce's bytes",
    )

    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what the fused layers of rank 0's group did in the second and third iteration, "
        "for chrome://tracing and Perfetto",
    )

    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=whole(1))
    group.add_argument("--hidden-size", type=whole(1))
    group.add_argument("--ffn-hidden-size", type=whole(1), help="width of the SwiGLU layer")
    group.add_argument("--num-attention-heads", type=whole(1))
    group.add_argument("--num-query-groups", type=whole(1), help="key/value heads")
    group.add_argument("--seq-length", type=whole(2))
    group.add_argument("--make-vocab-size-divisible-by", type=whole(1), help="times TP")
    group.add_argument("--bf16", dest="bf16", action="store_const", const=True)
    group.add_argument("--fp32", dest="bf16", action="store_const", const=False)
    group.add_argument("--recompute", action=flag, help="full recompute, uniform, one layer each")
    group.add_argument("--gradient-accumulation-fusion", action=flag)

    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=whole(1))
    group.add_argument("--global-batch-size", type=whole(1))
    group.add_argument("--train-iters", type=whole(1))
    group.add_argument("--lr", type=_number(0.0))
    group.add_argument("--min-lr", type=_number(0.0))
    group.add_argument("--lr-warmup-iters", type=whole(0), help="default: by the fraction")
    group.add_argument("--lr-warmup-fraction", type=_number(0.0, 1.0), help="of --train-iters")
    group.add_argument("--weight-decay", type=_number(0.0))
    group.add_argument("--clip-grad", type=_number(0.0), help="0 turns clipping off")
    group.add_argument("--use-distributed-optimizer", action=flag)
    group.add_argument("--overlap-grad-reduce", action=flag, help="behind the backward")
    group.add_argument("--overlap-param-gather", action=flag, help="behind the next forward")
    group.add_argument(
        "--ddp-bucket-size",
        type=whole(1),
        help="parameters per bucket, with --overlap-grad-reduce; default: Megatron's 40 million",
    )
    group.add_argument("--seed", type=whole(0))

    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path", type=_data_path, help="file or folder; default: Python's standard library"
    )
    group.add_argument("--valid-fraction", type=_number(0.0, 0.5), help="held-out share")

    group = parser.add_argument_group("output")
    group.add_argument("--eval-interval", type=whole(0), help="0 turns validation off")
    group.add_argument("--eval-iters", type=whole(1), help="global batches per validation")
    group.add_argument("--log-interval", type=whole(1))
    group.add_argument(
        "--mindspeed-log", action="store_true", help="a line per iteration in MindSpeed-LLM's form"
    )
    group.add_argument("--save-interval", type=whole(0), help="0 saves only when training ends")
    group.add_argument("--name", type=_run_name, help="of the folder below --runs-dir")
    group.add_argument("--runs-dir")
    group.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    group.add_argument(
        "--compare",
        action="store_true",
        help="train with plain, fused and Megatron's layers; exit 1 unless plain equals fused",
    )
    group.add_argument(
        "--plain",
        action="store_true",
        help="the plain form of what would be fused: collectives and GEMMs one after the other",
    )
    group.add_argument(
        "--html", type=page, metavar="FILE", help="with --compare: one page with the three losses"
    )

    group = parser.add_argument_group("CommFuse")
    add_arguments(group)
    group.add_argument(
        "--commfuse-fb-overlap",
        action=flag,
        help="run the forward of a micro-batch beside the backward of another; layers are fused "
        "where there is no partner; with --compare a fourth training, of Megatron's layers",
    )

    parser.add_argument("--config", type=Path, help=f"yaml, default configs/{DEFAULT_CONFIG.name}")
    return parser


# Requests for one run; a file that always resumes, compares, slows down or records would surprise.
_COMMAND_LINE_ONLY = {
    "resume": False,
    "compare": False,
    "plain": False,
    "link_rate": None,
    "mindspeed_log": False,
    "html": None,
    "trace": None,
    "commfuse_order_log": None,
}
_MAY_BE_NULL = {
    "commfuse_chunks",
    "commfuse_lanes",
    "data_path",
    "lr_warmup_iters",
    "ddp_bucket_size",
}


def _from_yaml(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of the yaml file, each converted and checked like the flag of the same name."""
    try:
        content = read_config(path)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    actions = {
        action.dest: action
        for action in parser._actions
        if action.dest not in {"help", "config", *_COMMAND_LINE_ONLY}
    }
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in actions:
            near = difflib.get_close_matches(name, actions, n=1, cutoff=0.0)
            raise UsageError(f"{path}: unknown option {key!r}; did you mean {near[0]!r}?")
        values[name] = _checked(actions[name], value, f"{path}: {key}")
    return values


def _checked(action: argparse.Action, value: Any, where: str) -> Any:
    if value is None:
        if action.dest in _MAY_BE_NULL:
            return None
        raise UsageError(f"{where} has no value")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} is not true or false")
        return value
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        converted = action.type(text) if callable(action.type) else text
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{where}: invalid value {value!r}: {error}") from error
    if action.choices is not None and converted not in action.choices:
        raise UsageError(f"{where}: {value!r} is not one of {', '.join(action.choices)}")
    return converted


def parse_arguments(
    argv: Sequence[str] | None = None, *, world_size: int | None
) -> argparse.Namespace:
    """Options of this run, complete and consistent with `world_size` processes.

    `None` stands for as many processes as the options ask for.

    Besides the options the namespace holds `num_microbatches`, per data-parallel rank and
    iteration.

    Raises `UsageError` for anything unknown, missing, out of range or not divisible.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    config = given.pop("config", DEFAULT_CONFIG)
    values = {**_COMMAND_LINE_ONLY, **_from_yaml(config, parser), **given}
    for action in parser._actions:
        if action.dest not in values and action.dest not in {"help", "config"}:
            raise UsageError(
                f"{action.option_strings[0]} is neither given nor in {config}; "
                f"add `{action.dest}: ...` to the file or give the flag"
            )
    args = argparse.Namespace(**values)
    if args.tensor_model_parallel_size == 1:
        # Nothing to split the sequence over; Megatron refuses the combination.
        args.sequence_parallel = False
    _check_layout(args, world_size)
    _check_commfuse(args)
    _check_model(args)
    _check_training(args)
    _check_folders(args)
    if args.link_rate is not None:
        _check_link_rate(args)
    if args.trace is not None:
        _check_trace(args)
    args.num_microbatches = args.global_batch_size // (
        args.micro_batch_size * args.data_parallel_size
    )
    return args


def _check_layout(args: argparse.Namespace, world_size: int | None) -> None:
    tp, cp, dp = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.data_parallel_size,
    )
    if world_size is not None and tp * cp * dp != world_size:
        ways = f"start {tp * cp * dp} processes (torchrun --nproc_per_node {tp * cp * dp})"
        if world_size % (tp * cp) == 0:
            ways += f" or pass --data-parallel-size {world_size // (tp * cp)}"
        elif world_size % (cp * dp) == 0:
            ways += f" or pass --tensor-model-parallel-size {world_size // (cp * dp)}"
        times_cp = f"times --context-parallel-size {cp} " if cp > 1 else ""
        raise UsageError(
            f"{world_size} processes were started, but --tensor-model-parallel-size {tp} "
            f"{times_cp}times --data-parallel-size {dp} is {tp * cp * dp}; {ways}"
        )
    if args.overlap_param_gather and not (
        args.use_distributed_optimizer and args.overlap_grad_reduce
    ):
        raise UsageError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; "
            "give all three, or leave --overlap-param-gather out"
        )


def _check_commfuse(args: argparse.Namespace) -> None:
    """As MindSpeed's feature does; of Ulysses there is one algorithm here."""
    try:
        check_flag(args)
        complete_options(argparse.Namespace(**vars(args), context_parallel_algo="ulysses_cp_algo"))
    except (IncompatibleOptionsError, ValueError) as error:
        raise UsageError(str(error)) from error


def _divisible(value: int, divisor: int, what: str, by: str, option: str) -> None:
    """Raise unless `divisor` divides `value`; the message names the nearest values that work."""
    if value % divisor:
        below = value // divisor * divisor
        nearest = f"{below} or {below + divisor}" if below else str(divisor)
        raise UsageError(
            f"{what} {value} is not divisible by {by} {divisor}; choose {option} {nearest}"
        )


def _check_model(args: argparse.Namespace) -> None:
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    by_tp = "the tensor-parallel size"
    heads, groups = args.num_attention_heads, args.num_query_groups
    _divisible(args.hidden_size, heads, "hidden size", "the number of heads", "--hidden-size")
    if args.hidden_size // heads % 2:
        raise UsageError(
            f"the head dimension {args.hidden_size // heads} is odd, but rotary embeddings turn "
            f"pairs; choose --hidden-size {2 * heads * max(1, args.hidden_size // heads // 2)}"
        )
    _divisible(heads, tp, "number of attention heads", by_tp, "--num-attention-heads")
    _divisible(groups, tp, "number of query groups", by_tp, "--num-query-groups")
    _divisible(
        heads, groups, "number of attention heads", "the query groups", "--num-attention-heads"
    )
    _divisible(args.ffn_hidden_size, tp, "feed-forward width", by_tp, "--ffn-hidden-size")
    if cp > 1:
        by = "the tensor-parallel times the context-parallel size"
        _divisible(heads, tp * cp, "number of attention heads", by, "--num-attention-heads")
        parts, by = (tp * cp, by) if args.sequence_parallel else (cp, "the context-parallel size")
        _divisible(args.seq_length, parts, "sequence length", by, "--seq-length")
    elif args.sequence_parallel:
        _divisible(args.seq_length, tp, "sequence length", by_tp, "--seq-length")


def _check_training(args: argparse.Namespace) -> None:
    step = args.micro_batch_size * args.data_parallel_size
    _divisible(
        args.global_batch_size,
        step,
        "global batch size",
        "micro-batch size times data-parallel size",
        "--global-batch-size",
    )
    if args.lr_warmup_iters is None:
        args.lr_warmup_iters = int(args.lr_warmup_fraction * (args.train_iters - 1))
    if args.lr_warmup_iters >= args.train_iters:
        raise UsageError(
            f"{args.lr_warmup_iters} warm-up iterations leave nothing of {args.train_iters} "
            f"training iterations; pass --lr-warmup-iters below {args.train_iters}"
        )
    if args.min_lr > args.lr:
        raise UsageError(
            f"--min-lr {args.min_lr} is above --lr {args.lr}; choose --min-lr of at most {args.lr}"
        )
    if args.eval_interval and args.valid_fraction == 0.0:
        raise UsageError(
            "validation needs held-out data, but --valid-fraction is 0; "
            "pass --valid-fraction 0.05 or --eval-interval 0"
        )
    if args.html is not None and not args.compare:
        raise UsageError(f"--html {args.html} is of a comparison; give --compare, too")
    if args.plain and (args.compare or not args.use_commfuse):
        raise UsageError(
            "--plain is the plain form of what would be fused, which --compare trains by itself; "
            "choose --use-commfuse, and leave --compare out"
        )
    if args.commfuse_fb_overlap and args.trace is not None:
        raise UsageError(
            "--trace is of fused layers, which --commfuse-fb-overlap runs only where a micro-batch "
            "has no partner; leave one of the two out"
        )
    if args.compare and args.resume:
        raise UsageError("--compare trains from the beginning; leave --resume out")
    elsewhere = args.commfuse_ulysses or (args.commfuse_dp and args.data_parallel_size > 1)
    if args.compare and args.tensor_model_parallel_size == 1 and not elsewhere:
        raise UsageError(
            "--compare has nothing to compare at --tensor-model-parallel-size 1, where no layer "
            "transfers anything; choose 2 or more, --commfuse-ulysses with context parallelism, or "
            "--commfuse-dp with --data-parallel-size of at least 2"
        )


def _check_folders(args: argparse.Namespace) -> None:
    """What is written can be, as far as it shows before anything is made."""
    for option in ("runs_dir", "commfuse_order_log"):
        folder, said = getattr(args, option), f"--{option.replace('_', '-')}"
        if folder is None:
            continue
        if not folder:
            raise UsageError(f"{said} '' is no folder; choose another {said}")
        there = next(one for one in (Path(folder), *Path(folder).parents) if one.exists())
        if not there.is_dir():
            raise UsageError(
                f"cannot create the folder {folder}: {there}: Not a directory; choose another "
                f"{said}"
            )


def _check_trace(args: argparse.Namespace) -> None:
    asked = f"--trace {args.trace}"
    if args.trace.is_dir():
        raise UsageError(f"{asked} is a folder; give the name of a file")
    if args.compare or args.plain or not args.use_commfuse:
        raise UsageError(
            f"{asked} is of fused layers; choose --use-commfuse, and leave --compare and --plain "
            "out"
        )
    if args.train_iters < 2:
        raise UsageError(
            f"{asked} begins after the first iteration, but --train-iters is {args.train_iters}; "
            "choose 2 or more"
        )


def _check_link_rate(args: argparse.Namespace) -> None:
    asked = f"--link-rate {args.link_rate:g}"
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if tp * cp * args.data_parallel_size == 1:
        raise UsageError(
            f"{asked} needs links, but there is 1 process; choose --tensor-model-parallel-size 2 "
            "or more, or leave --link-rate out"
        )
    if args.distributed_backend != "gloo":
        raise UsageError(
            f"{asked} paces gloo's connections, but --distributed-backend is "
            f"{args.distributed_backend}; choose gloo, or leave --link-rate out"
        )
    if args.compare and args.train_iters <= WARM_UP_ITERATIONS:
        raise UsageError(
            f"--compare {asked} measures after {WARM_UP_ITERATIONS} warm-up iterations, but "
            f"--train-iters is {args.train_iters}; choose --train-iters "
            f"{WARM_UP_ITERATIONS + 1} or more"
        )
