"""The options of ``commfuse-npu simulate``."""

from __future__ import annotations

import argparse

from commfuse_npu.tools.option_types import Parser, new_file, page, picture, positive, whole, words

__all__ = ["parser"]

_MOST_TOKENS, _MOST_MICRO_BATCHES, _MOST_CHUNKS = 1 << 24, 1 << 16, 256
"""Nobody trains with more, and the simulation would not end."""


def parser() -> argparse.ArgumentParser:
    """The parser of the subcommand."""
    parser = Parser(
        prog="commfuse-npu simulate",
        description="Simulates training steps on a described machine, for this project's ops and "
        "for what they compete with. Nothing is measured; ranges show how uncertain the "
        "description is.",
        epilog="Exit codes: 0 simulated, 2 options or files make no sense.",
    )
    what = parser.add_argument_group("what is simulated")
    what.add_argument(
        "--model", default="llama3_8b", help="a yaml file, or its name in configs/: %(default)s"
    )
    what.add_argument(
        "--hardware",
        default="ascend_910b_server",
        help="a yaml file, or its name in configs/hardware/: %(default)s",
    )
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline")):
        what.add_argument(
            f"--{name}", type=whole(), help=f"{meaning}-parallel size; the model's by default"
        )
    what.add_argument(
        "--npus",
        type=whole(),
        nargs="+",
        help="numbers of NPUs instead of --dp, to see what scales",
    )
    what.add_argument(
        "--sequence-lengths",
        type=whole(1, _MOST_TOKENS),
        nargs="+",
        help="the model's by default",
        metavar="S",
    )
    what.add_argument("--micro-batch", type=whole(), help="sequences; the model's by default")
    what.add_argument(
        "--micro-batches",
        type=whole(1, _MOST_MICRO_BATCHES),
        help="per step and replica; by default what the model's global batch gives",
    )
    what.add_argument("--recompute", choices=("none", "full"), default="none")
    what.add_argument(
        "--ulysses",
        choices=("none", "plain", "fused"),
        default="none",
        help="context parallelism by exchanging heads; fused: CommFuse's variants with "
        "--commfuse-ulysses; none: as the model's file says",
    )
    what.add_argument(
        "--data-parallel",
        choices=("blocking", "overlapped", "commfuse"),
        default="overlapped",
        help="exchange of gradients and parameters: Megatron's without overlap, with it, or "
        "--commfuse-dp; default %(default)s",
    )
    what.add_argument(
        "--deterministic",
        action="store_true",
        help="HCCL sums in an order (MindSpeed's --npu-deterministic), in every variant's "
        "tensor-parallel reduce-scatters; ours do it always",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--variants", type=words, default=("*",), help="names or patterns: 'coc-*,commfuse-*'"
    )
    how.add_argument("--lanes", type=whole(), help="of CommFuse; by default what suits the links")
    how.add_argument(
        "--chunks", type=whole(1, _MOST_CHUNKS), nargs="+", default=[1, 2, 4], help="of CommFuse"
    )
    how.add_argument(
        "--launch-us",
        type=positive,
        metavar="US",
        help="microseconds for which a launch keeps the host, and a batch as many more, instead of "
        "the description's",
    )
    how.add_argument(
        "--post-us",
        type=positive,
        metavar="US",
        help="microseconds for which a point-to-point batch keeps the host, posted and waited for, "
        "instead of the description's",
    )
    how.add_argument(
        "--typical", action="store_true", help="typical figures only, no ranges; 5 times as fast"
    )
    out = parser.add_argument_group("what comes out (besides Markdown tables)")
    out.add_argument("--json", type=new_file, metavar="FILE")
    out.add_argument("--all", action="store_true", help="all variants, not those that matter")
    out.add_argument(
        "--html", type=page, metavar="FILE", help="one page: verdict, pictures, a layer's Gantt"
    )
    out.add_argument("--plot", type=picture, metavar="FILE", help="the pictures: .png, .svg")
    return parser
