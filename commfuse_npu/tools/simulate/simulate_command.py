"""``commfuse-npu simulate``: from options to tables, a verdict and pictures."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from commfuse_npu.launch.options import whole
from commfuse_npu.tools.config_file import ConfigError, find_config
from commfuse_npu.tools.drawing import Bit, Chart, Row, Size, draw, gantt, lacking
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import (
    Parser,
    new_file,
    positive,
    refuse,
    write_figures,
    write_output,
)
from commfuse_npu.tools.simulate.engine import COMPUTE, STREAMS, Simulated
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.timed import CORNERS, as_json, best, show, timed
from commfuse_npu.tools.simulate.training import Layout, training
from commfuse_npu.tools.simulate.variants import MEGATRON, REFERENCE, Variant, forms
from commfuse_npu.tools.terminal import tell

_MOST_TOKENS = 1 << 24
_MOST_MICRO_BATCHES = 1 << 16
"""Upper limits of option values: larger ones are unrealistic and would take too long."""

_LINKS = "links"
_INSTANT = 1e-9


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="commfuse-npu simulate",
        description="Simulates training steps on a described machine, for this project's ops and "
        "for what they compete with. Nothing is measured; ranges show how uncertain the "
        "description is.",
        epilog="Exit codes: 0 simulated, 2 invalid options or files.",
    )
    add = parser.add_argument_group("what is simulated").add_argument
    add("--model", default="llama3_8b", help="a yaml file, or its name in configs/: %(default)s")
    add(
        "--hardware",
        default="ascend_910b_server",
        help="a yaml file, or its name in configs/hardware/: %(default)s",
    )
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline")):
        add(f"--{name}", type=whole(), help=f"{meaning}-parallel size; the model's by default")
    for name, most, meaning in (
        ("sequence-length", _MOST_TOKENS, "tokens; the model's by default"),
        ("micro-batch", _MOST_TOKENS, "sequences; the model's by default"),
        ("micro-batches", _MOST_MICRO_BATCHES, "per step and replica; by default what the model's "
         "global batch gives"),
    ):  # fmt: skip
        add(f"--{name}", type=whole(1, most), metavar="N", help=meaning)
    add("--recompute", choices=("none", "full"), default="none")
    add(
        "--ulysses",
        action="store_true",
        help="context parallelism by exchanging heads, whatever the model's file says",
    )
    add(
        "--deterministic",
        action="store_true",
        help="HCCL reduces in a fixed order (MindSpeed's --npu-deterministic), in every variant's "
        "tensor-parallel reduce-scatters; CommFuse always does",
    )
    add = parser.add_argument_group("how").add_argument
    for name, meaning in (
        ("launch", "a launch keeps the host, and a batch as many more,"),
        ("post", "a point-to-point batch keeps the host, posted and waited for,"),
    ):
        add(
            f"--{name}-us",
            type=positive,
            metavar="US",
            help=f"microseconds for which {meaning} instead of the description's",
        )
    add("--typical", action="store_true", help="typical figures only, no ranges; 5 times as fast")
    add = parser.add_argument_group("what comes out (besides Markdown tables)").add_argument
    add("--json", type=new_file, metavar="FILE")
    add("--svg", type=_svg, metavar="FILE", help="a Gantt chart of one layer")
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
    hardware = Hardware.find(arguments.hardware)
    hardware = replace(hardware, deterministic=arguments.deterministic)
    if arguments.launch_us:
        hardware = hardware.launching(arguments.launch_us * 1e-6)
    if arguments.post_us:
        hardware = hardware.posting(arguments.post_us * 1e-6)
    model_path = find_config(arguments.model)
    model = ModelConfig.load(model_path)
    if arguments.ulysses:
        model = replace(model, context_parallel_algo="ulysses_cp_algo")
    tp = arguments.tp or model.tensor_model_parallel_size
    cp = arguments.cp or model.context_parallel_size
    pp = arguments.pp or model.pipeline_model_parallel_size
    replicas, remainder = divmod(model.world_size, tp * cp * pp)
    layout = Layout(tp, cp, arguments.dp or (1 if remainder else replicas), pp)
    hardware.check(layout.npus)
    try:
        setup = training(
            model,
            layout,
            arguments.sequence_length,
            micro_batch=arguments.micro_batch,
            micro_batches=arguments.micro_batches,
            recomputes=arguments.recompute == "full",
        )
    except ConfigError as error:
        # A launch's options are keys of the model's file.
        named = re.sub(r"--([a-z-]+)", lambda key: key[1].replace("-", "_"), str(error))
        raise ConfigError(f"{model_path}: {named}") from error
    rows = []
    for form in forms(hardware.machine(), setup):
        tell(f"{setup.model.seq_length} tokens, {layout.npus} NPUs: {form.name}")
        rows.append(timed(setup, form, hardware, 1 if arguments.typical else len(CORNERS)))
    first = best(rows)
    flags = first.form.flags or "none, it is Megatron's order"
    title = show(rows, hardware, model_path.stem, f"Options of this form: {flags}.")

    def picture(path: Path) -> None:
        shown = dict.fromkeys((REFERENCE, MEGATRON, first.form))
        layer = layer_picture(TrainingStep(hardware.machine(), setup), shown)
        draw([layer], f"{title}, {hardware.name}, simulated", path)

    write_figures(arguments.json, as_json(rows, hardware, arguments.model))
    write_output(arguments.svg, ": a layer", picture)
    return 0


# ------------------------------------------------------------------------ the picture


def layer_picture(step: TrainingStep, variants: Iterable[Variant]) -> Chart:
    """A Gantt chart of one layer in each of these variants: work of a rank, transfers on its links,
    and waiting.  The rank is the one in the middle, or the one that represents all."""
    rows = [_lanes(variant.name, step.parts(variant)) for variant in variants]
    axis = "ms, typical figures; lower is better"
    return gantt("One layer, forward and backward", axis, rows, Size(18, 72, 300))


def _lanes(title: str, parts: Sequence[Simulated]) -> Row:
    """The parts in sequence, in ms.

    Waiting is time in which the first stream is idle.
    """
    bits: list[Bit] = []
    begin = 0.0

    def add(lane: str, start: float, end: float, kind: str, label: str = "") -> None:
        bits.append(Bit(lane, 1e3 * (begin + start), 1e3 * (begin + end), kind, label))

    def wait(start: float, end: float) -> None:
        if end - start > _INSTANT:
            add(COMPUTE, start, end, "waiting", f"{1e3 * (end - start):.1f}")

    for simulated in parts:
        at = 0.0
        shown = simulated.shown_rank
        for span in simulated.spans:
            lane = span.operation.engine
            if lane not in STREAMS or span.rank != shown or span.start == span.end:
                continue
            if lane == COMPUTE:
                wait(at, span.start)
                at = span.end
            add(lane, span.start, span.end, "work")
        wait(at, simulated.seconds)
        everyone = simulated.links.folded
        moved = (m for m in simulated.moved if everyone or m.message.source == shown)
        for start, end in sorted({(m.start, m.end) for m in moved}):
            add(_LINKS, start, end, "transfer")
        begin += simulated.seconds
    waited = sum(bit.end - bit.start for bit in bits if bit.kind == "waiting")
    used = {bit.lane for bit in bits}
    label = f"{title}: {1e3 * begin:.1f} ms, waiting {waited:.1f} ms"
    return Row(label, tuple(row for row in (*STREAMS, _LINKS) if row in used), tuple(bits))
