"""``commfuse-npu bench``: from the options to the report."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from commfuse_npu.config_file import find_config
from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.tools.bench.report import as_markdown, verdict
from commfuse_npu.tools.bench.results import Result, load
from commfuse_npu.tools.bench.shapes import ITEM_BYTES, WORKS
from commfuse_npu.tools.bench.sweep import Bench, Conditions, Sweep, full, quick, with_options
from commfuse_npu.tools.bench.variants import chosen
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import (
    Parser,
    new_file,
    positive,
    refuse,
    whole,
    words,
    words_from,
)
from commfuse_npu.tools.outputs import Output, write_outputs
from commfuse_npu.tools.ranks import Ranks, lacking_backend
from commfuse_npu.tools.terminal import print_verdict, tell

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The parser of the subcommand."""
    parser = Parser(
        prog="commfuse-npu bench",
        description="Measures how much communication is hidden behind computation, on links that "
        "are given a rate, for this project's ops and their alternatives.",
        epilog="Exit codes: 0 measured, 1 a rank failed, 2 invalid options, 130 Ctrl-C or SIGTERM "
        "(what was measured by then is printed).",
    )
    add = parser.add_argument_group("what is measured").add_argument
    add("--quick", action="store_true", help="about 3 minutes, not 25")
    add("--works", type=words_from(WORKS), help=f"from {', '.join(WORKS)}")
    add("--variants", type=words, help="names or patterns: p2p,coc-4,'ours-*'")
    add("--ratios", type=_ratios, help="communication / computation: 0,0.25,0.5,1,1.5,2")
    add("--ranks", type=_sizes, help="2,4")
    add("--dtypes", type=words_from(ITEM_BYTES), help="fp32,bf16")
    add("--sleep-gemm", type=positive, metavar="GFLOPS",
        help="GEMMs sleep for as long as they would take on an NPU that is scaled down to this "
        "speed; for more ranks than cores")  # fmt: skip
    add = parser.add_argument_group("how large").add_argument
    add("--config", default="llama3_8b", help="a yaml file, or its name in configs/: %(default)s")
    add("--scale", type=_scale,
        help="divides all widths, from 1; default 16/3 for one layer, 8 for blocks")  # fmt: skip
    add("--sequence", type=whole(), help="rows; default a quarter of the model's")
    add = parser.add_argument_group("how").add_argument
    add("--rounds", type=whole(), help="per ratio")
    add("--seed", type=whole(0), default=0, help="of the numbers and of the order")
    add("--device", choices=("cpu", "npu", "cuda"), default="cpu", help="npu, cuda: read, not run")
    add("--timeout", type=positive, default=120.0, help="seconds for a round; default 120")
    add = parser.add_argument_group("what comes out (besides a Markdown table)").add_argument
    add("--json", type=new_file, metavar="FILE")
    add("--from", dest="stored", type=Path, metavar="FILE",
        help="measure nothing: show what --json wrote")  # fmt: skip
    add("--all", action="store_true", help="all variants, not the five that matter")
    return parser


def _ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = {float(word) for word in words(text)}
    except ValueError:
        ratios = {-1.0}
    if not all(0 <= ratio <= 100 for ratio in ratios):
        raise argparse.ArgumentTypeError(f"{text!r}: ratios are numbers from 0 to 100")
    return tuple(sorted(ratios))


def _scale(text: str) -> float:
    if (scale := positive(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1: no layer is wider than the model's")
    return scale


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole(2, 64), words(text))))


def main(words: Sequence[str]) -> int:
    """Measure and print; returns the exit code: 0, 1 a rank failed, 2 bad options, 130 Ctrl-C."""
    options = parser().parse_args(words)
    results: list[Result] = []
    try:
        if options.stored is not None:
            return _show(options, *load(options.stored))
        config = find_config(options.config)
        conditions = Conditions(
            config, options.device, options.scale, options.sequence, options.seed
        )
        sweeps = _sweeps(options, config)
    except (OSError, ValueError) as error:
        return refuse("bench", error)
    code = 0
    # As for Ctrl-C: the ranks are stopped on the way out.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _measure(sweeps, conditions, options.timeout, results)
    except KeyboardInterrupt:
        conditions.note("interrupted; this is what was measured until then")
        code = 130
    except RuntimeError as error:
        # Only the first and the last line of a rank's traceback.
        lines = str(error).strip().splitlines()
        refuse("bench", RuntimeError(" ".join(dict.fromkeys((lines[0], lines[-1])))))
        conditions.note("a rank failed; this is what was measured until then")
        code = 1
    finally:
        signal.signal(signal.SIGTERM, before)
    if results or not code:
        facts = {"model": config.stem, "seed": options.seed, "link measured": conditions.wires}
        machine = {**conditions.machine, **facts}
        code = _show(options, machine, results, conditions.notes) or code
    return code


def _sweeps(options: argparse.Namespace, config: Path) -> list[Sweep]:
    if options.device != "cpu" and options.sleep_gemm:
        raise ValueError("--sleep-gemm is for CPUs with fewer cores than ranks; leave it out")
    if why := lacking_backend(options.device):
        raise ValueError(why)
    ModelConfig.load(config)
    sweeps = with_options(quick() if options.quick else full(), options)
    for sweep in sweeps:
        chosen(sweep.variants, sweep.ranks)
    # On a device each rank has its own engine, so GEMMs need not sleep.
    return [sweep for sweep in sweeps if options.device == "cpu" or sweep.gflops is None]


def _measure(
    sweeps: Sequence[Sweep], conditions: Conditions, timeout: float, results: list[Result]
) -> None:
    """Append the results one by one, so that an interrupted run keeps them."""
    # Sweeps with the same ranks share their processes, which take seconds to start.
    for size, group in groupby(sweeps, key=lambda sweep: sweep.ranks):
        tell(f"starting {size} ranks")
        with Ranks(size, device=conditions.device, timeout=timeout) as ranks:
            bench = Bench(ranks.ask, size, conditions)
            bench.measure_link()
            for sweep in group:
                for result in bench.run(sweep):
                    results.append(result)


def _show(
    options: argparse.Namespace,
    machine: dict[str, Any],
    results: list[Result],
    notes: list[str],
) -> int:
    """Print the verdict and the tables, and write the requested file.

    Returns:
        0, or 2 if it cannot be written.
    """
    if results:
        first, *lines = verdict(results)
        print_verdict(first, True)
        print(*lines, "", sep="\n")
    print(as_markdown(machine, results, notes, options.all))
    written = {"machine": {**machine, "notes": notes}, "results": list(map(asdict, results))}

    def write_figures(path: Path) -> None:
        write_json(path, written, indent=1)

    output = Output("--json", options.json, ": all figures", write_figures)
    return write_outputs("bench", [output])
