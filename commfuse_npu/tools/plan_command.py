"""``commfuse-npu plan``: print the program of one rank, or recommend a layout for a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.plan import Place, PlanError, Program, Schedule, rules
from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import Parser, new_file, page, picture, positive, refuse, whole
from commfuse_npu.tools.outputs import Output, write_outputs
from commfuse_npu.tools.report.drawing import draw
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.page import plan_page, plan_pictures
from commfuse_npu.tools.simulate.recommend import Fixed, NoLayoutError, recommend
from commfuse_npu.tools.simulate.recommendation_report import as_json, options, report
from commfuse_npu.tools.simulate.sweep import Options
from commfuse_npu.tools.simulate.written_plan import check_target, write_plan
from commfuse_npu.tools.tell import tell

__all__ = ["main"]

_SHOWN: dict[str, Any] = {
    "ranks": 4, "rank": 0, "shape": "shifted", "lanes": None, "chunks": 1, "taper": 1.0,
    "node_size": None, "rows": 64, "columns": 64,
}  # fmt: skip
"""What of a program is not said; the parser leaves it open, to notice what has no effect."""

_MOST_RANKS, _MOST_ROWS = 1024, 1 << 24


def _program(rule: str, place: Place, rows: int, columns: int) -> Program:
    shapes: dict[str, tuple[object, ...]] = {
        "gather_gemm": (rows, columns, columns, False, None, 0),
        "gemm_scatter": (rows, columns, columns),
        "column_backward": (rows, columns, columns, True, True, "whole"),
        "gemm_all_reduce": (rows * place.size, columns, columns),
        "produce_scatter": (rows, columns),
        "gather_use": (rows, columns, True),
        "exchange": (rows, columns, "made", True, False, False),
        "sharded_forward": (rows, columns),
        "sharded_backward": (rows, columns, True, True),
        "bucket_scatter": (rows, place.size - 1, 2),
        "bucket_gather": (rows, False),
    }
    return rules.RULES[rule](place, *shapes[rule])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="commfuse-npu plan",
        description="With a rule: prints the program of one rank, what it posts, awaits, computes "
        "and adds, as on HCCL. With --model: simulates the layouts "
        "and schedules of a training on a described cluster and recommends one. Nothing is "
        "measured.",
        epilog="Exit codes: 0 answered, 1 no layout fits, 2 options or files make no sense.",
    )
    show = parser.add_argument_group("a program")
    show.add_argument("rule", nargs="?", choices=sorted(rules.RULES))
    kinds: dict[str, Any] = {
        "shape": str, "taper": positive, "ranks": whole(2, _MOST_RANKS), "rank": whole(0)
    }  # fmt: skip
    for name, default in _SHOWN.items():
        said = "" if default is None else f"default {default}"
        kind = kinds.get(name, whole(1, _MOST_ROWS))
        show.add_argument(f"--{name.replace('_', '-')}", type=kind, help=said)
    choose = parser.add_argument_group("recommending")
    choose.add_argument("--model", help="a yaml file, or its name in configs/: llama3_70b")
    choose.add_argument(
        "--hardware", help="a yaml file, or its name in configs/hardware/: ascend_910b_server"
    )
    choose.add_argument("--npus", type=whole(), help="all of them are used; the model's by default")
    choose.add_argument(
        "--sequence-length", type=whole(), metavar="S", help="the model's by default"
    )
    choose.add_argument("--micro-batch", type=whole(), help="sequences; the model's by default")
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        choose.add_argument(
            f"--{name}", type=whole(), help=f"{meaning}-parallel size; chosen by default"
        )
    choose.add_argument(
        "--recompute", choices=("none", "full"), help="by default only where memory is short"
    )
    choose.add_argument(
        "--other-rounding",
        action="store_true",
        help="also schedules that round weight gradients in another way (--commfuse-wgrad blocks)",
    )
    choose.add_argument("--json", type=new_file, metavar="FILE")
    choose.add_argument("--html", type=page, metavar="FILE", help="one page, with pictures")
    choose.add_argument("--plot", type=picture, metavar="FILE", help="the pictures: .png, .svg")
    choose.add_argument(
        "--write",
        type=new_file,
        metavar="FILE",
        help="a configuration for the launchers: CONFIG=FILE bash scripts/launch_pretraining.sh",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = _parser()
    given = parser.parse_args(words)
    if (given.rule is None) == (given.model is None):
        parser.error("give a rule to see its program, or --model to get a recommendation")
    chosen = {name for name, value in vars(given).items() if value not in (None, False)}
    idle = chosen - {"rule"} - _SHOWN.keys() if given.rule else chosen & _SHOWN.keys()
    if idle:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(idle))
        what = "a program" if given.rule else "a recommendation, which chooses them"
        parser.error(f"{listed}: no effect on {what}; leave it out")
    try:
        return _show(given) if given.model is None else _recommend(given, words)
    except (PlanError, ValueError, OSError) as error:
        return refuse("plan", error)


def _show(given: argparse.Namespace) -> int:
    said = {name: value for name in _SHOWN if (value := getattr(given, name)) is not None}
    options = _SHOWN | said
    rank, ranks, rows, columns = (
        options.pop(name) for name in ("rank", "ranks", "rows", "columns")
    )
    if rank >= ranks:
        raise PlanError(f"--rank {rank} is not one of --ranks {ranks}; choose 0 to {ranks - 1}")
    lanes = options["lanes"]
    if lanes is not None and lanes >= ranks:
        raise PlanError(
            f"--lanes {lanes}: {ranks} ranks have {ranks - 1} peers; choose 1 to {ranks - 1} lanes"
        )
    print(_program(given.rule, Place(Schedule(**options), rank, ranks, True), rows, columns))
    return 0


def _recommend(given: argparse.Namespace, words: Sequence[str]) -> int:
    hardware = Hardware.load(find_config(given.hardware or "ascend_910b_server", "hardware"))
    path = find_config(given.model)
    model = ModelConfig.load(path)
    ulysses = model.context_parallel_algo == "ulysses_cp_algo"
    if given.write:
        check_target(given.write)
    try:
        found = recommend(
            model,
            hardware,
            model.world_size if given.npus is None else given.npus,
            sequence=given.sequence_length,
            options=Options(micro_batch=given.micro_batch, ulysses="fused" if ulysses else "none"),
            fixed=Fixed(given.tp, given.cp, given.pp, given.recompute),
            other_rounding=given.other_rounding,
            tell=tell,
        )
    except NoLayoutError as error:
        return refuse("plan", error, code=1)
    tell("")
    print(report(found, model, path, hardware))
    title = f"{path.stem}, {found.best.layout.npus} NPUs of {hardware.name}"
    launcher = f"CONFIG={given.write or 'FILE'} bash scripts/launch_pretraining.sh"
    launches = {
        "Options of pretrain_gpt.py:": " ".join(options(model, found.best)),
        "On every node, with what `--write FILE` writes:": launcher,
    }

    def picture_file(path: Path) -> None:
        draw(plan_pictures(found, hardware), f"{title} (simulated)", path)

    def page_file(path: Path) -> None:
        plan_page(path, title, ["commfuse-npu", "plan", *words], hardware, found, launches)

    # First what a launch needs: the page names it.
    return write_outputs(
        "plan",
        [
            Output(
                "--write",
                given.write,
                f". On every node:\n\n    {launcher}",
                lambda path: write_plan(path, found, model, hardware),
            ),
            Output(
                "--json",
                given.json,
                ": all figures",
                lambda path: write_json(path, as_json(found, model), indent=1),
            ),
            Output("--plot", given.plot, ": pictures", picture_file),
            Output("--html", given.html, ": a page for a browser", page_file),
        ],
    )
