"""The options of ``commfuse-npu bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from commfuse_npu.tools.bench.shapes import ITEM_BYTES, WORKS
from commfuse_npu.tools.option_types import Parser, new_file, page, picture, positive, whole, words

__all__ = ["parser"]


def parser() -> argparse.ArgumentParser:
    """The parser of the subcommand."""
    parser = Parser(
        prog="commfuse-npu bench",
        description="Measures how much communication is hidden behind computation, on links that "
        "are given a rate, for this project's ops and for what they compete with.",
        epilog="Exit codes: 0 measured, 1 a rank failed, 2 options make no sense, 130 Ctrl-C (what "
        "was measured by then is printed).",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--quick", action="store_true", help="about 3 minutes, not 25")
    what.add_argument("--works", type=words, help=f"from {', '.join(WORKS)}")
    what.add_argument("--variants", type=words, help="names or patterns: p2p,coc-4,'ours-*'")
    what.add_argument(
        "--ratios", type=_ratios, help="communication / computation: 0,0.25,0.5,1,1.5,2"
    )
    what.add_argument("--ranks", type=_sizes, help="2,4")
    what.add_argument("--dtypes", type=words, help="fp32,bf16")
    what.add_argument(
        "--sleep-gemm",
        type=positive,
        metavar="GFLOPS",
        help="GEMMs sleep for as long as they would take on an NPU that is scaled down to this "
        "speed; for more ranks than cores",
    )
    size = parser.add_argument_group("how large")
    size.add_argument(
        "--config", default="llama3_8b", help="a yaml file, or its name in configs/: %(default)s"
    )
    size.add_argument(
        "--scale",
        type=positive,
        help="divide all widths by this; default 16/3 for a single layer, 8 for blocks",
    )
    size.add_argument("--sequence", type=whole(), help="rows; default a quarter of the model's")
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=whole(), help="per ratio")
    how.add_argument("--seed", type=whole(0), default=0, help="of the numbers and of the order")
    how.add_argument("--device", choices=("cpu", "npu", "cuda"), default="cpu",
                     help="npu, cuda: read, not run")  # fmt: skip
    how.add_argument(
        "--timeout", type=positive, default=120.0, help="seconds for a round; default 120"
    )
    out = parser.add_argument_group("what comes out (besides a Markdown table)")
    out.add_argument("--json", type=new_file, metavar="FILE")
    out.add_argument(
        "--from",
        dest="stored",
        type=Path,
        metavar="FILE",
        help="measure nothing: show what --json wrote",
    )
    out.add_argument("--all", action="store_true", help="all variants, not the five that matter")
    out.add_argument("--html", type=page, metavar="FILE", help="one page, with pictures")
    out.add_argument("--plot", type=picture, metavar="FILE", help="the pictures: .png, .svg")
    parser.set_defaults(known={"works": tuple(WORKS), "dtypes": tuple(ITEM_BYTES)})
    return parser


def _ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = {float(word) for word in words(text)}
    except ValueError:
        ratios = {-1.0}
    if not all(0 <= ratio <= 100 for ratio in ratios):
        raise argparse.ArgumentTypeError(f"{text!r}: ratios are numbers from 0 to 100")
    return tuple(sorted(ratios))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole(2, 64), words(text))))
