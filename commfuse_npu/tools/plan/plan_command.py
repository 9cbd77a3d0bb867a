"""``commfuse-npu plan``: for a launch or a folder of them, a profile, or a model."""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from textwrap import wrap

from commfuse_npu.launch.options import whole
from commfuse_npu.plan.machines import described
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.doctor.local_machine import LocalMachine, listed_npus
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.launch_script import NoTrainingError, UsageError
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import (
    Parser,
    new_file,
    refuse,
    write_figures,
    write_output,
)
from commfuse_npu.tools.plan.asked_launch import ask_about
from commfuse_npu.tools.plan.launch_plan import LaunchPlan, plan_launch
from commfuse_npu.tools.plan.npu_profile import find_profiles, plan_profile
from commfuse_npu.tools.simulate.recommend import (
    Fixed,
    NoLayoutError,
    check_target,
    options,
    planned,
    recommend,
    write_plan,
)
from commfuse_npu.tools.simulate.timed import as_json, best, show
from commfuse_npu.tools.simulate.variants import LEGEND
from commfuse_npu.tools.terminal import table_head, table_row, tell

_HARDWARE = "ascend_910b_server"
"""The description if there are no NPUs here, and nothing says A3."""
_A3 = "ascend_910c_supernode"
_HEAD = ("script", "now, ms", "best form", "less time than now", "GiB of usable", "machine",
         "what to do")  # fmt: skip
"""Columns of the table of a folder."""
_LEGEND = (
    "Simulated, not measured: a step at typical figures (ranges over uncertain ones), and the "
    "memory of the fullest rank in the best form. `commfuse-npu plan SCRIPT` has all forms of one "
    f"launch. {LEGEND}"
)
_SAYS_A3 = re.compile(r"(?<![A-Za-z0-9])A3(?![A-Za-z0-9])", re.I)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="commfuse-npu plan",
        description="With a launch script: what each form would bring, which flags to add, "
        "what refuses them. With a configuration of configs/: the same of its "
        "launcher. With a folder of scripts: a row for each. With *_ascend_pt folders of "
        "torch_npu's profiler: how much communication is exposed and could be hidden. "
        "With --model: simulates the layouts and schedules of a training on a described cluster "
        "and recommends one. Nothing is measured.",
        epilog="After -- a launch as it is typed: commfuse-npu plan -- torchrun ... "
        "pretrain_gpt.py .... A script is read by running it in bash behind a filter of system "
        "calls: that changes no file, process or socket. Exit codes: 0 answered, 1 no layout "
        "fits or the launch would fail at its start, 2 invalid request.",
    )
    add = parser.add_argument
    add(
        "what",
        nargs="?",
        help="a launch script (its arguments after --), a folder of scripts or of profiles, or a "
        "configuration's yaml file",
    )
    add(
        "--nproc-per-node",
        type=whole(),
        metavar="N",
        help="for a launch script that gets it from a command, such as npu-smi",
    )
    add = parser.add_argument_group("recommending").add_argument
    add("--model", help="a yaml file, or its name in configs/: llama3_70b")
    add(
        "--hardware",
        help=f"a yaml file, or its name in configs/hardware/; default {_HARDWARE}; for a launch "
        f"that of the NPUs here, else {_A3} if it starts 16 processes per node or its path says A3",
    )
    add("--npus", type=whole(), help="all of them are used; the model's by default")
    add("--sequence-length", type=whole(), metavar="S", help="the model's by default")
    add("--micro-batch", type=whole(), help="sequences; the model's by default")
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        add(f"--{name}", type=whole(), help=f"{meaning}-parallel size; chosen by default")
    add("--recompute", choices=("none", "full"), help="by default only where memory is short")
    add("--json", type=new_file, metavar="FILE")
    add(
        "--write",
        type=new_file,
        metavar="FILE",
        help="a configuration for the launchers: CONFIG=FILE bash scripts/launch_pretraining.sh",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Run the subcommand; the exit codes are those that ``--help`` lists."""
    parser = _parser()
    # Split here, because versions of argparse treat the two dashes differently.
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    launch = words[end + 1 :]
    recommends = options.model is not None
    if bool(options.what is not None or launch) == recommends:
        parser.error("give a launch script, a folder of scripts or profiles, or --model NAME")
    folder = Path(options.what or "")
    a_folder = options.what is not None and folder.is_dir()
    if a_folder and launch:
        parser.error(f"-- {launch[0]}: no effect on {options.what}; leave it out")
    chosen = {name for name, value in vars(options).items() if value is not None}
    scripts = sorted(filter(Path.is_file, folder.rglob("*.sh"))) if a_folder else []
    a_profile = a_folder and not scripts
    takes = {"what", "json"} if a_profile else {"what", "json", "hardware", "nproc_per_node"}
    if not recommends and (idle := sorted(chosen - takes)):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        parser.error(f"{names}: no effect without --model; leave it out")
    if recommends and options.nproc_per_node:
        parser.error("--nproc-per-node: no effect with --model; use --npus")
    try:
        if recommends:
            return _recommend(options)
        if a_profile:
            return plan_profile(find_profiles(folder), options.json)
        if a_folder:
            return _folder(options, folder, scripts)
        return _launch(options, launch)
    except (UsageError, ValueError, OSError) as error:
        return refuse("plan", error)


def _launch(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    path = arguments.what
    config = None
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise UsageError(
                f"{path!r} is no file and no folder; give a launch script, a configuration's yaml "
                "file, a folder of scripts or profiles, or --model NAME"
            )
        if file.suffix in (".yaml", ".yml"):
            config = file
        elif file.suffix in ("", ".sh", ".bash"):
            words = ["bash", path, *words]
        else:
            started = f"commfuse-npu plan -- torchrun ... {path} ARGS"
            way_out = started if file.suffix == ".py" else "give a .sh file"
            raise UsageError(f"{path} is no launch script by its name; {way_out}")
    tell(f"reading what {path or 'the command'} starts")
    plan = _planner(arguments)(words, config)
    print(f"{plan.verdict}\n\n{plan}")
    write_figures(arguments.json, plan.as_json())
    return int(bool(plan.problems))


def _planner(arguments: argparse.Namespace) -> Callable[..., LaunchPlan]:
    """What plans the launch of a command line on the machine that was asked for, else on that of
    the NPUs here, else on that of the launch.  The NPUs are listed once, and each description is
    read once."""
    descriptions = {described(name) for name, _ in listed_npus(LocalMachine.this())} - {None}
    default = descriptions.pop() if len(descriptions) == 1 else None
    load = cache(Hardware.find)

    def plan(words: Sequence[str], config: Path | None = None) -> LaunchPlan:
        launch = ask_about(config, words, os.environ, arguments.nproc_per_node)
        # A server of an A3 has 16 NPUs, one of an A2 has 8.
        a3 = launch.config.npus_per_node == 16 or any(map(_SAYS_A3.search, words))
        return plan_launch(
            launch, load(arguments.hardware or default or (_A3 if a3 else _HARDWARE))
        )

    return plan


def _folder(arguments: argparse.Namespace, folder: Path, scripts: Sequence[Path]) -> int:
    """Print a row for each launch; scripts that start no training are counted."""
    plan = _planner(arguments)
    plans: dict[str, LaunchPlan | str] = {}
    others = 0
    for path in scripts:
        name = str(path.relative_to(folder))
        tell(f"{len(plans)} launches; reading {name}")
        try:
            plans[name] = plan(["bash", str(path)])
        except NoTrainingError:
            others += 1
        except (UsageError, ValueError, OSError) as error:
            plans[name] = str(error)
    print(table_head(_HEAD, numbers=False), *_rows(plans), sep="\n")
    print(f"\n{len(plans)} launches; {others} other scripts start no training.\n\n{_LEGEND}")
    content = {
        name: {"error": found} if isinstance(found, str) else found.as_json()
        for name, found in plans.items()
    }
    write_figures(arguments.json, content)
    return 0


def _rows(plans: dict[str, LaunchPlan | str]) -> Iterator[str]:
    """The launches with the largest gain first, those without a known gain last."""
    for name, found in sorted(plans.items(), key=_gain, reverse=True):
        if isinstance(found, str):
            yield table_row((name, *"-----", found))
            continue
        best = found.best
        changes = best is not found.now and not found.problems
        what = best.change if changes else found.verdict
        if changes and found.unsimulated:
            what += f" (gain not known: {found.unsimulated})"
        yield table_row((
            name,
            f"{1e3 * found.now.seconds:,.0f}" if found.now.timed else "-",
            best.name,
            found.saved.percent if found.saved and changes else "-",
            f"{best.gibibytes:.1f} of {found.usable:.1f}" if best.timed else "-",
            "A3" if "A3" in found.hardware.name else "A2",
            what,
        ))  # fmt: skip


def _gain(item: tuple[str, LaunchPlan | str]) -> float:
    found = item[1]
    if isinstance(found, str) or not found.saved:
        return -1.0
    return found.saved.typical


def _recommend(arguments: argparse.Namespace) -> int:
    hardware = Hardware.find(arguments.hardware or _HARDWARE)
    path = find_config(arguments.model)
    model = ModelConfig.load(path)
    if arguments.write:
        check_target(arguments.write)
    asked = replace(
        model,
        seq_length=arguments.sequence_length or model.seq_length,
        micro_batch_size=arguments.micro_batch or model.micro_batch_size,
    )
    fixed = Fixed(arguments.tp, arguments.cp, arguments.pp, arguments.recompute)
    try:
        rows, fitting = recommend(asked, hardware, arguments.npus or model.world_size, fixed)
    except NoLayoutError as error:
        return refuse("plan", error, code=1)
    first = best(rows)
    plan = planned(model, hardware, first.training, first.form)
    launch = " \\\n    ".join(wrap(" ".join(options(model, plan)), 72, break_on_hyphens=False))
    show(rows, hardware, path.stem, f"Options of pretrain_gpt.py:\n\n    {launch}")
    print(f"\n{fitting}.")
    launcher = f"CONFIG={arguments.write} bash scripts/launch_pretraining.sh"
    written = partial(write_plan, plan=plan, row=first, hardware=hardware)
    # First the file that a launch needs.
    write_output(arguments.write, f". On every node:\n\n    {launcher}", written)
    write_figures(arguments.json, as_json(rows, hardware, arguments.model))
    return 0
