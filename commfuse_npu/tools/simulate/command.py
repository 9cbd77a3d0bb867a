"""``commfuse-npu simulate``: from options to tables, a verdict, pictures and a trace."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commfuse_npu.config_file import ConfigError, find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import refuse
from commfuse_npu.tools.outputs import Output, write_outputs
from commfuse_npu.tools.report.charts import Row
from commfuse_npu.tools.report.drawing import draw
from commfuse_npu.tools.simulate.arguments import parser
from commfuse_npu.tools.simulate.page import layer, layer_picture, sweep_page
from commfuse_npu.tools.simulate.plot import pictures
from commfuse_npu.tools.simulate.recommendation_report import launching
from commfuse_npu.tools.simulate.report import heading, table
from commfuse_npu.tools.simulate.standing import of as standing_of
from commfuse_npu.tools.simulate.standing import verdict
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, Point, of_hardware, sweep, training
from commfuse_npu.tools.tell import tell

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run the subcommand; see :mod:`.arguments` for the options."""
    given = parser().parse_args(words)
    try:
        return _main(given, words)
    except (ValueError, OSError, ImportError) as error:
        return refuse("simulate", error)


def _main(given: argparse.Namespace, words: Sequence[str]) -> int:
    hardware = Hardware.load(find_config(given.hardware, "hardware"))
    hardware = replace(hardware, deterministic=given.deterministic)
    if given.launch_us is not None:
        hardware = hardware.launching(given.launch_us * 1e-6)
    if given.post_us is not None:
        hardware = hardware.posting(given.post_us * 1e-6)
    model_path = find_config(given.model)
    model = ModelConfig.load(model_path)
    layouts = _layouts(given, model)
    _refuse_what_is_not_there(given, layouts[0])
    sequences = given.sequence_lengths or [model.seq_length]
    options = Options(
        micro_batch=given.micro_batch,
        micro_batches=given.micro_batches,
        lanes=given.lanes,
        chunks=tuple(dict.fromkeys(given.chunks)),
        patterns=given.variants,
        recompute=given.recompute,
        ulysses=given.ulysses,
        data_parallel=given.data_parallel,
        corners=not given.typical,
    )
    first = layouts[0]
    known = {variant.name: variant for variant in of_hardware(hardware, first, options)}
    try:
        swept = sweep(model, hardware, layouts, sequences, options, tell)
    except ConfigError as error:
        lines = [_own_options(line) for line in str(error).splitlines()]
        raise ConfigError("\n".join(f"{model_path}: {line}" for line in lines)) from error
    replicas = ", ".join(str(layout.dp) for layout in layouts)
    sizes = f"TP {first.tp}, CP {first.cp}, PP {first.pp}, DP {replicas}"
    print(heading(hardware, model_path.stem, sizes))
    points: list[Point] = []
    everything = given.all or options.patterns != Options.patterns
    try:
        for point in swept:
            points.append(point)
    finally:
        # Whatever ends it: what was found until then is shown.
        tell("")
        standing = standing_of(points, known)
        names = standing.shown(list(known), everything)
        for point in points:
            print("\n" + table(point, standing, names), flush=True)
    print()
    what = training(model, first, sequences[0], options)
    step = Step(hardware.machine(), what)
    launches = {
        name: [*launching(known[name], what)] for name in (standing.ours, standing.alike) if name
    }
    said = verdict(points, standing, launches)
    rows: list[Row] = []
    if given.plot or given.html:
        rows = layer(step, [(name, known[name]) for name in standing.compared])
    title = f"{model_path.stem} on {hardware.name}, {sizes}"

    def picture_file(path: Path) -> None:
        drawn = [*pictures(points, standing, names), layer_picture(rows)]
        draw(drawn, f"{title} (simulated)", path)

    def page_file(path: Path) -> None:
        command = ["commfuse-npu", "simulate", *words]
        sweep_page(path, title, command, hardware, points, standing, names, said, rows)

    code = write_outputs(
        "simulate",
        [
            Output(
                "--json",
                given.json,
                ": all figures",
                lambda path: write_json(path, _as_json(given.model, hardware, points), indent=1),
            ),
            Output("--plot", given.plot, ": pictures", picture_file),
            Output("--html", given.html, ": a page for a browser", page_file),
        ],
    )
    print()
    print("\n".join(said).replace("**", "").replace("`", ""))
    return code


def _own_options(problem: str) -> str:
    """Name what can be given here: a launch's other options are keys of the model's file."""
    here = problem.replace("--seq-length", "--sequence-lengths")
    return re.sub(r"--(?!sequence-lengths)([a-z-]+)", lambda of: of[1].replace("-", "_"), here)


def _refuse_what_is_not_there(given: argparse.Namespace, layout: Layout) -> None:
    ranks = max(layout.tp, layout.cp)
    most = max(1, ranks - 1)
    if (given.lanes or 0) > most:
        said = f"--lanes {given.lanes}: a group of {ranks} ranks has {most}"
        raise ValueError(f"{said}; choose {most} or less")


def _layouts(given: argparse.Namespace, model: ModelConfig) -> list[Layout]:
    tp = given.tp or model.tensor_model_parallel_size
    cp = given.cp or model.context_parallel_size
    pp = given.pp or model.pipeline_model_parallel_size
    one = tp * cp * pp
    if given.npus is None:
        fits = model.world_size % one == 0
        return [Layout(tp, cp, given.dp or (model.world_size // one if fits else 1), pp)]
    if given.dp is not None:
        raise ValueError("--npus and --dp say the same twice; give one of them")
    for npus in given.npus:
        if npus % one:
            raise ValueError(
                f"--npus {npus} is not divisible by TP*CP*PP = {tp}*{cp}*{pp} = {one}; choose "
                + (f"{npus // one * one} or " if npus > one else "")
                + f"{npus // one * one + one}"
            )
    return [Layout(tp, cp, npus // one, pp) for npus in given.npus]


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
                "variants": [outcome.as_json() for outcome in point.outcomes],
            }
            for point in points
        ],
    }
