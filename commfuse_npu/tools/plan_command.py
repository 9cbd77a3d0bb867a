"""``commfuse-npu plan``: draw the plan of one rank, or recommend one for a model and a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from commfuse_npu.plan import Kind, PlanError, Schedule
from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import whole
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.recommend import Fixed, NoLayoutError, recommend
from commfuse_npu.tools.simulate.recommendation_report import as_json, report
from commfuse_npu.tools.simulate.sweep import Options

__all__ = ["main"]

_DRAWN: dict[str, Any] = {
    "ranks": 4, "rank": 0, "own": None, "shape": "shifted", "lanes": None, "chunks": 1,
    "taper": 1.0, "order": "interleaved", "node_size": None,
}  # fmt: skip
"""What of a drawing is not said; the parser leaves it open, to notice what has no effect."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="commfuse-npu plan",
        description="With a kind: draws the plan of one rank. With --model: simulates the layouts "
        "and schedules of a training on a described cluster and recommends one. Nothing is "
        "measured.",
        epilog="Exit codes: 0 answered, 1 no layout fits, 2 options or files make no sense.",
    )
    draw = parser.add_argument_group("drawing")
    draw.add_argument("kind", nargs="?", choices=get_args(Kind))
    draw.add_argument("--own", choices=("first", "last"), help="for all_to_all")
    for name, default in _DRAWN.items():
        if name != "own":
            kind = int if default is None else type(default)
            said = "" if default is None else f"default {default}"
            draw.add_argument(f"--{name.replace('_', '-')}", type=kind, help=said)
    choose = parser.add_argument_group("recommending")
    choose.add_argument("--model", help="a yaml file, or its name in configs/: llama3_70b")
    choose.add_argument(
        "--hardware", help="a yaml file, or its name in configs/hardware/: ascend_910b_server"
    )
    choose.add_argument("--npus", type=int, help="all of them are used; the model's by default")
    choose.add_argument("--sequence-length", type=whole, metavar="S", help="the model's by default")
    choose.add_argument("--micro-batch", type=whole, help="sequences; the model's by default")
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        choose.add_argument(
            f"--{name}", type=whole, help=f"{meaning}-parallel size; chosen by default"
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
    return parser


def main(words: Sequence[str]) -> int:
    """Run the subcommand."""
    given = _parser().parse_args(words)
    if (given.kind is None) == (given.model is None):
        return _complain("give a kind to draw, or --model to get a recommendation")
    chosen = {name for name, value in vars(given).items() if value not in (None, False)}
    idle = chosen - {"kind"} - _DRAWN.keys() if given.kind else chosen & _DRAWN.keys()
    if idle:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(idle))
        what = "a drawing" if given.kind else "a recommendation, which chooses them"
        return _complain(f"{listed}: no effect on {what}; leave it out")
    try:
        return _draw(given) if given.model is None else _recommend(given)
    except (PlanError, ValueError, OSError) as error:
        return _complain(str(error))


def _complain(why: str, code: int = 2) -> int:
    for line in why.splitlines():
        print(f"commfuse-npu plan: error: {line}", file=sys.stderr)
    return code


def _draw(given: argparse.Namespace) -> int:
    said = {name: value for name in _DRAWN if (value := getattr(given, name)) is not None}
    drawn = _DRAWN | said
    rank, ranks, own = drawn.pop("rank"), drawn.pop("ranks"), drawn.pop("own")
    print(Schedule(**drawn).plan(given.kind, rank, ranks, own).draw())
    return 0


def _recommend(given: argparse.Namespace) -> int:
    hardware = Hardware.load(find_config(given.hardware or "ascend_910b_server", "hardware"))
    path = find_config(given.model)
    model = ModelConfig.load(path)
    ulysses = model.context_parallel_algo == "ulysses_cp_algo"
    try:
        found = recommend(
            model,
            hardware,
            model.world_size if given.npus is None else given.npus,
            sequence=given.sequence_length,
            options=Options(micro_batch=given.micro_batch, ulysses="fused" if ulysses else "none"),
            fixed=Fixed(given.tp, given.cp, given.pp, given.recompute),
            other_rounding=given.other_rounding,
        )
    except NoLayoutError as error:
        return _complain(str(error), code=1)
    print(report(found, model, path, hardware))
    if given.json:
        write_json(given.json, as_json(found, model), indent=1)
    return 0
