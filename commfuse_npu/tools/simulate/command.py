"""``commfuse-npu simulate``: from options to tables, a verdict and pictures."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commfuse_npu.config_file import ConfigError, find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import Parser, new_file, positive, refuse, whole
from commfuse_npu.tools.option_types import words as word_list
from commfuse_npu.tools.outputs import Output, write_outputs
from commfuse_npu.tools.report.drawing import draw, lacking
from commfuse_npu.tools.simulate.lanes import layer_picture
from commfuse_npu.tools.simulate.launch_options import launching
from commfuse_npu.tools.simulate.report import Standing, sources, table
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, Point, of_hardware, sweep, training
from commfuse_npu.tools.simulate.variants import Variant
from commfuse_npu.tools.terminal import print_verdict

__all__ = ["main"]

_MOST_TOKENS, _MOST_MICRO_BATCHES, _MOST_CHUNKS = 1 << 24, 1 << 16, 256
"""Upper limits of option values: larger ones are unrealistic and would take too long."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="commfuse-npu simulate",
        description="Simulates training steps on a described machine, for this project's ops and "
        "for what they compete with. Nothing is measured; ranges show how uncertain the "
        "description is.",
        epilog="Exit codes: 0 simulated, 2 invalid options or files.",
    )
    subject = parser.add_argument_group("what is simulated")
    subject.add_argument(
        "--model", default="llama3_8b", help="a yaml file, or its name in configs/: %(default)s"
    )
    subject.add_argument(
        "--hardware",
        default="ascend_910b_server",
        help="a yaml file, or its name in configs/hardware/: %(default)s",
    )
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline")):
        subject.add_argument(
            f"--{name}", type=whole(), help=f"{meaning}-parallel size; the model's by default"
        )
    subject.add_argument(
        "--npus",
        type=whole(),
        nargs="+",
        help="numbers of NPUs instead of --dp, to see what scales",
    )
    subject.add_argument(
        "--sequence-lengths",
        type=whole(1, _MOST_TOKENS),
        nargs="+",
        help="the model's by default",
        metavar="S",
    )
    subject.add_argument("--micro-batch", type=whole(), help="sequences; the model's by default")
    subject.add_argument(
        "--micro-batches",
        type=whole(1, _MOST_MICRO_BATCHES),
        help="per step and replica; by default what the model's global batch gives",
    )
    subject.add_argument("--recompute", choices=("none", "full"), default="none")
    subject.add_argument(
        "--ulysses",
        action="store_true",
        help="context parallelism by exchanging heads, whatever the model's file says",
    )
    subject.add_argument(
        "--deterministic",
        action="store_true",
        help="HCCL reduces in a fixed order (MindSpeed's --npu-deterministic), in every variant's "
        "tensor-parallel reduce-scatters; CommFuse always does",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--variants", type=word_list, default=("*",), help="names or patterns: 'coc-*,commfuse-*'"
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
    out.add_argument("--svg", type=_svg, metavar="FILE", help="a Gantt chart of one layer")
    return parser


def _svg(text: str) -> Path:
    """A file for a picture; also checks that pictures can be drawn."""
    path = new_file(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"{text!r} is not an SVG file; let its name end in .svg")
    if why := lacking():
        raise argparse.ArgumentTypeError(f"{text!r} {why}, or leave the option out")
    return path


def main(words: Sequence[str]) -> int:
    """Parse the options, simulate, and print; returns the exit code."""
    options = _parser().parse_args(words)
    try:
        return _main(options)
    except (ValueError, OSError, ImportError) as error:
        return refuse("simulate", error)


def _main(arguments: argparse.Namespace) -> int:
    hardware = Hardware.load(find_config(arguments.hardware, "hardware"))
    hardware = replace(hardware, deterministic=arguments.deterministic)
    if arguments.launch_us is not None:
        hardware = hardware.launching(arguments.launch_us * 1e-6)
    if arguments.post_us is not None:
        hardware = hardware.posting(arguments.post_us * 1e-6)
    model_path = find_config(arguments.model)
    model = ModelConfig.load(model_path)
    layouts = _layouts(arguments, model)
    tp, cp, _, pp, _ = first = layouts[0]
    if (arguments.lanes or 0) > max(1, tp - 1):
        raise ValueError(
            f"--lanes {arguments.lanes}: a group of {tp} ranks has {max(1, tp - 1)}; choose "
            f"{max(1, tp - 1)} or less"
        )
    sequences = arguments.sequence_lengths or [model.seq_length]
    options = Options(
        micro_batch=arguments.micro_batch,
        micro_batches=arguments.micro_batches,
        lanes=arguments.lanes,
        chunks=tuple(dict.fromkeys(arguments.chunks)),
        patterns=arguments.variants,
        recompute=arguments.recompute,
        ulysses=arguments.ulysses,
        corners=not arguments.typical,
    )
    of_hardware(hardware, first, options)  # raises if a pattern matches no variant
    try:
        swept = sweep(model, hardware, layouts, sequences, options)
    except ConfigError as error:
        lines = [_own_options(line) for line in str(error).splitlines()]
        raise ConfigError("\n".join(f"{model_path}: {line}" for line in lines)) from error
    sizes = f"TP {tp}, CP {cp}, PP {pp}, DP {', '.join(str(layout.dp) for layout in layouts)}"
    title = f"{model_path.stem} on {hardware.name}, {sizes}"
    points: list[Point] = []
    standing = Standing(points)
    everything = arguments.all or options.patterns != Options.patterns
    setup = training(model, first, sequences[0], options)
    verdict, variants = list[str](), list[Variant]()
    try:
        for point in swept:
            points.append(point)
    finally:
        # Also after an error or an interrupt, show the results so far.
        if points:
            variants = standing.selected(everything)
            verdict = standing.verdict(lambda variant: " ".join(launching(variant, setup)))
            print_verdict(verdict[0], True)
            print(*verdict[1:], "", f"{title}. {sources(hardware)}", sep="\n")
        for point in points:
            print("\n" + table(point, variants), flush=True)
    return write_outputs(
        "simulate",
        [
            Output(
                "--json",
                arguments.json,
                ": all figures",
                lambda path: write_json(
                    path, _as_json(arguments.model, hardware, points), indent=1
                ),
            ),
            Output(
                "--svg",
                arguments.svg,
                ": one layer at the first point",
                lambda path: draw(
                    layer_picture(Step(hardware.machine(), setup), standing.compared), title, path
                ),
            ),
        ],
    )


def _own_options(problem: str) -> str:
    """Rename a launch's options in a message: here they are keys of the model's file."""
    here = problem.replace("--seq-length", "--sequence-lengths")
    return re.sub(r"--(?!sequence-lengths)([a-z-]+)", lambda key: key[1].replace("-", "_"), here)


def _layouts(arguments: argparse.Namespace, model: ModelConfig) -> list[Layout]:
    tp = arguments.tp or model.tensor_model_parallel_size
    cp = arguments.cp or model.context_parallel_size
    pp = arguments.pp or model.pipeline_model_parallel_size
    replica = tp * cp * pp
    if arguments.npus is None:
        fits = model.world_size % replica == 0
        return [Layout(tp, cp, arguments.dp or (model.world_size // replica if fits else 1), pp)]
    if arguments.dp is not None:
        raise ValueError("--npus and --dp say the same twice; give one of them")
    for npus in arguments.npus:
        if npus % replica:
            raise ValueError(
                f"--npus {npus} is not divisible by TP*CP*PP = {tp}*{cp}*{pp} = {replica}; choose "
                + (f"{npus // replica * replica} or " if npus > replica else "")
                + f"{npus // replica * replica + replica}"
            )
    return [Layout(tp, cp, npus // replica, pp) for npus in arguments.npus]


def _as_json(model: str, hardware: Hardware, points: list[Point]) -> dict[str, Any]:
    return {
        "simulated": True,
        "model": model,
        "hardware": {
            "file": str(hardware.path),
            "name": hardware.name,
            "deterministic": hardware.deterministic,
            "figures": {name: vars(figure) for name, figure in hardware.figures.items()},
        },
        "points": [
            {
                "sequence": point.sequence,
                "npus": point.npus,
                "micro_batches": point.micro_batches,
                "ratio": point.ratio._asdict(),
                "variants": [outcome.as_json() for outcome in point.outcomes.values()],
            }
            for point in points
        ],
    }
