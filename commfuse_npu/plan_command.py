"""``commfuse-npu plan``: draw the plan of one rank, or recommend one for a model and a cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from commfuse_npu.plan import Kind, PlanError, Schedule
from commfuse_npu.whole_file import write_json

__all__ = ["add_to", "main"]

KINDS: tuple[Kind, ...] = ("gather", "reduce_scatter", "all_to_all")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of the subcommand."""
    parser.description = (
        "With a kind: draws the plan of one rank. With --model: simulates the layouts and "
        "schedules of a training on a described cluster and recommends one. Nothing is measured."
    )
    draw = parser.add_argument_group("drawing")
    draw.add_argument("kind", nargs="?", choices=KINDS)
    draw.add_argument("--ranks", type=int, default=4)
    draw.add_argument("--rank", type=int, default=0)
    draw.add_argument("--own", choices=("first", "last"), help="for all_to_all")
    draw.add_argument("--shape", default="shifted")
    draw.add_argument("--lanes", type=int, default=2)
    draw.add_argument("--chunks", type=int, default=1)
    draw.add_argument("--taper", type=float, default=1.0)
    draw.add_argument("--order", default="interleaved")
    draw.add_argument("--node-size", type=int)
    choose = parser.add_argument_group("recommending")
    choose.add_argument("--model", help="a yaml file, or its name in configs/: llama3_70b")
    choose.add_argument(
        "--hardware",
        default="ascend_910b_server",
        help="a yaml file, or its name in configs/hardware/: %(default)s",
    )
    choose.add_argument("--npus", type=int, help="all of them are used; the model's by default")
    choose.add_argument(
        "--sequence-length", type=_whole, metavar="S", help="the model's by default"
    )
    choose.add_argument("--micro-batch", type=_whole, help="sequences; the model's by default")
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        choose.add_argument(
            f"--{name}", type=_whole, help=f"{meaning}-parallel size; chosen by default"
        )
    choose.add_argument(
        "--recompute", choices=("none", "full"), help="by default only where memory is short"
    )
    choose.add_argument(
        "--other-rounding",
        action="store_true",
        help="also schedules that round weight gradients in another way (--commfuse-wgrad blocks)",
    )
    choose.add_argument("--json", type=Path, metavar="FILE")
    parser.epilog = "Exit codes: 0 answered, 1 no layout fits, 2 options or files make no sense."


def main(given: argparse.Namespace) -> int:
    """Run the subcommand."""
    if (given.kind is None) == (given.model is None):
        print(
            "commfuse-npu plan: give a kind to draw, or --model to get a recommendation",
            file=sys.stderr,
        )
        return 2
    try:
        return _draw(given) if given.model is None else _recommend(given)
    except (PlanError, ValueError, OSError, ImportError) as error:
        for line in str(error).splitlines():
            print(f"commfuse-npu plan: error: {line}", file=sys.stderr)
        return 1 if type(error).__name__ == "NoLayoutError" else 2


def _draw(given: argparse.Namespace) -> int:
    schedule = Schedule(
        shape=given.shape,
        lanes=given.lanes,
        chunks=given.chunks,
        order=given.order,
        node_size=given.node_size,
        taper=given.taper,
    )
    print(schedule.plan(given.kind, given.rank, given.ranks, given.own).draw())
    return 0


def _recommend(given: argparse.Namespace) -> int:
    # They need PyYAML.
    from commfuse_npu.model_config import ModelConfig
    from commfuse_npu.simulate.hardware import Hardware, find_config
    from commfuse_npu.simulate.recommend import Fixed, recommend
    from commfuse_npu.simulate.recommendation_report import as_json, report
    from commfuse_npu.simulate.sweep import Options

    hardware = Hardware.load(find_config(given.hardware, "hardware"))
    path = find_config(given.model)
    model = ModelConfig.load(path)
    found = recommend(
        model,
        hardware,
        model.world_size if given.npus is None else given.npus,
        sequence=given.sequence_length,
        options=Options(micro_batch=given.micro_batch),
        fixed=Fixed(given.tp, given.cp, given.pp, given.recompute),
        other_rounding=given.other_rounding,
    )
    print(report(found, model, path, hardware))
    if given.json:
        write_json(given.json, as_json(found, model), indent=1)
    return 0


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a whole number from 1")
    return value
