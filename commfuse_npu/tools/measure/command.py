"""``commfuse-npu measure``: what the simulator assumes of this machine, measured."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.whole_file import whole_file
from commfuse_npu.tools.bench.processes import Ranks, RanksError
from commfuse_npu.tools.config_file import ConfigError, find_config
from commfuse_npu.tools.doctor import Machine
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.measure.deadline import Deadline
from commfuse_npu.tools.measure.description import description
from commfuse_npu.tools.measure.facts import machine_facts
from commfuse_npu.tools.measure.folder import Folder, FolderError
from commfuse_npu.tools.measure.forms import Launches, launches
from commfuse_npu.tools.measure.layer import layer_times
from commfuse_npu.tools.measure.page import Shown, compared, measured_page, verdict_lines
from commfuse_npu.tools.measure.steps import LAUNCH, STEPS, Ask, Scale, Step
from commfuse_npu.tools.measure.trainings import train, trained
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import Parser, positive, refuse, whole, words
from commfuse_npu.tools.report.drawing import lacking
from commfuse_npu.tools.simulate.described import described
from commfuse_npu.tools.simulate.hardware import Hardware

__all__ = ["main"]

_WORKER = "commfuse_npu.tools.measure.worker:Worker"
_BASES = {"cpu": "cpu_paced", "cuda": "cpu_paced", "npu": "ascend_910b_server"}
"""Whose peaks and unmeasured figures hold, by device, where neither --base nor its name says."""
_STARTS = 2
"""How often ranks are started in vain before no other step asks for them."""
_SAME = "device name", "backend", "torch", "cores"
"""What has to be the same when a run is gone on with."""


def main(given: Sequence[str]) -> int:
    """Measure; returns the exit code: 0 all, 1 not all, 2 bad options, 130 Ctrl-C."""
    options = _parser().parse_args(given)
    with tempfile.TemporaryDirectory(prefix="commfuse-measure-") as scratch:
        return _main(options, given, Path(scratch))


def _main(options: argparse.Namespace, given: Sequence[str], scratch: Path) -> int:
    try:
        scale = _scale(options)
        launched = None
        if options.launch is not None:
            launched = launches(options.launch, options.device, options.ranks, scratch)
        if options.base is not None:
            find_config(options.base, "hardware")
        about = {"device": options.device, "ranks": options.ranks, "config": options.config}
        about |= {"base": options.base, "one device": options.one_device, "rows": scale.rows}
        about |= {layer: list(shape) for layer, shape in scale.layers().items()}
        folder = Folder(options.folder, about, resume=options.resume)
    except (ConfigError, FolderError, UsageError, OSError) as error:
        return refuse("measure", error)
    command = ["commfuse-npu", "measure", *given]
    try:
        failed = _measure(options, scale, folder, launched)
        code = 1 if failed else 0
    except (FolderError, OSError) as error:
        return refuse("measure", error)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept", file=sys.stderr)
        code = 130
    _write(options, folder, command)
    if code and lacking_backend(options.device):
        print(lacking_backend(options.device), file=sys.stderr)
    elif code:
        print(f"Go on with: commfuse-npu measure --resume {shlex.join(_without_resume(given))}")
    return code


def lacking_backend(device: str) -> str:
    """Why ranks cannot run on a device at all; empty if nothing is missing."""
    if device == "npu" and importlib.util.find_spec("torch_npu") is None:
        return (
            "--device npu: torch_npu is not installed; install it (commfuse-npu doctor says which "
            "one), or measure another machine: --device cpu"
        )
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="commfuse-npu measure",
        description="Measures what the simulator assumes of a machine: lanes, GEMMs whole and cut, "
        "the host, sums, attention, and what they cost each other. Every step is kept when it is "
        "over; the file measured.yaml is for simulate --hardware and plan --hardware.",
        epilog="Steps: "
        + "; ".join(f"{step.name}: {step.question}" for step in STEPS)
        + " Exit codes: 0 all measured, 1 a step failed or was left out, 2 options make no sense, "
        "130 Ctrl-C (what was finished by then is kept).",
    )
    parser.add_argument("--device", choices=tuple(_BASES), default="npu",
                        help="npu, cuda: read, not run; default %(default)s")  # fmt: skip
    parser.add_argument("--ranks", type=whole(2, 1024), default=8, help="default %(default)s")
    parser.add_argument(
        "--one-device",
        action="store_true",
        help="as one of --ranks on the only device: GEMMs, sums, attention of a rank's shapes, and "
        "layers with copies at a rate as its links; what needs the others is left out",
    )
    parser.add_argument(
        "--config", default="llama3_8b", help="whose layers; a yaml file, or its name in configs/"
    )
    parser.add_argument(
        "--base",
        metavar="DESCRIPTION",
        help="in configs/hardware: peaks, and figures that are not measured; default by the device",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("measured"), help="for all files; default %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    parser.add_argument("--steps", type=words, help="only these, in the order of the list below")
    parser.add_argument(
        "--minutes",
        type=positive,
        default=50.0,
        help="nothing begins after, and what goes on is ended a tenth later; default %(default)g",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help="for one question, or one form; default the step's",
    )
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        help="train ten iterations of it in each form: plain, Megatron's order, CommFuse, MC2, "
        "CoC; a launch script of MindSpeed-LLM and its arguments, or its torchrun command (read, "
        "rehearsed, not run on NPUs); with --device cpu scripts/pretrain_llama_cpu.sh",
    )
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    known = [step.name for step in STEPS]
    for name in options.steps or ():
        if name not in known:
            raise FolderError(f"--steps {name}: choose from {', '.join(known)}")
    asked = options.steps is None or LAUNCH in options.steps
    if options.steps and asked and options.launch is None:
        raise FolderError(f"--steps {LAUNCH} needs a launch; give it by --launch")
    if options.launch is not None and not asked:
        raise FolderError(f"--launch: no effect without {LAUNCH} among --steps; add it")
    if options.one_device and options.device == "npu":
        raise FolderError("--one-device holds streams as CUDA can; take --device cuda or cpu")
    if options.one_device and options.launch is not None:
        raise FolderError("--launch trains on all ranks; leave it out with --one-device")
    config = ModelConfig.load(find_config(options.config))
    return Scale.of(config, options.ranks, options.device)


def _measure(
    options: argparse.Namespace, scale: Scale, folder: Folder, launched: Launches | None
) -> list[str]:
    """Returns the steps that failed or were left out."""
    deadline = Deadline(options.minutes)
    if launched is not None:
        # Queues, affinities and buffers of ranks are those of the launch that they are asked for.
        os.environ.update(launched.environment)
    if folder.kept("machine") is None:
        folder.keep("machine", machine_facts(options.device, Machine.this()))
    left = []
    ranks: Ranks | None = None
    in_vain = 0
    try:
        for step in STEPS:
            if options.steps and step.name not in options.steps:
                continue
            if options.one_device and not step.alone:
                print(f"{step.name}: left out, it needs the other ranks")
                continue
            if step.name == LAUNCH:
                if launched is None:
                    print(f"{step.name}: not asked for; --launch COMMAND measures it, too")
                    continue
                # They would be in the way of others.
                _end(ranks)
                ranks = None
                left += _launch(step, options, launched, folder, deadline)
                continue
            known = folder.kept(step.name)
            if known is not None and "times" in known:
                print(f"{step.name}: kept, {len(known['times'])} times")
                continue
            why = f"{deadline.minutes:g} minutes are over" if deadline.over else ""
            if step.ask is not None and in_vain == _STARTS:
                why = f"ranks could not be started, {_STARTS} times"
            if why:
                print(f"{step.name}: left out, {why}")
                left.append(step.name)
                continue
            print(f"{step.name}: {step.question}", flush=True)
            start = time.monotonic()
            said: list[str] = []
            try:
                if step.ask is None:
                    _end(ranks)
                    ranks = None
                    limit = deadline.limit(options.timeout or step.seconds)
                    times, said = layer_times(
                        scale, options.config, options.device, limit, one_device=options.one_device
                    )
                else:
                    in_vain += ranks is None
                    ranks = ranks or _started(options, folder)
                    in_vain = 0
                    times = step.ask(_bounded(ranks, step, options, deadline), scale)
                content = {"question": step.question, "times": times, "said": said}
                took = time.monotonic() - start
                folder.keep(step.name, {**content, "took seconds": round(took, 1)})
                print(f"{step.name}: {len(times)} times, in {took:.0f} s", flush=True)
            except FolderError:
                raise
            except Exception as error:
                # Whatever it is, the hour goes on, with new ranks.
                _end(ranks)
                ranks = None
                why = str(error) if isinstance(error, RanksError) else traceback.format_exc()
                folder.keep(step.name, {"failed": why})
                print(f"{step.name}: failed: {why.splitlines()[-1]}", file=sys.stderr)
                left.append(step.name)
    finally:
        _end(ranks)
    return left


def _end(ranks: Ranks | None) -> None:
    if ranks is not None:
        ranks.close()


def _started(options: argparse.Namespace, folder: Folder) -> Ranks:
    seconds = options.timeout or max(step.seconds for step in STEPS if step.ask)
    size = 1 if options.one_device else options.ranks
    ranks = Ranks(size, device=options.device, timeout=seconds, worker=_WORKER)
    ranks.__enter__()
    first, *others = ranks.ask("machine")
    known = folder.kept("machine") or {}
    told = known if "backend" in known else first  # what only ranks tell
    if other := [key for key in _SAME if told.get(key) != first.get(key)]:
        ranks.close()
        there = "; ".join(
            f"{key} {told.get(key)!r} there, {first.get(key)!r} here" for key in other
        )
        raise FolderError(
            f"{folder.path} holds what was measured on another machine: {there}; choose another "
            "folder with --folder"
        )
    differing = [key for key in first if any(one.get(key) != first[key] for one in others)]
    folder.keep("machine", {**known, **first, "not the same on all ranks": differing})
    return ranks


def _bounded(ranks: Ranks, step: Step, options: argparse.Namespace, deadline: Deadline) -> Ask:
    def ask(method: str, *args: Any, **flags: Any) -> list[Any]:
        ranks.timeout = deadline.limit(options.timeout or step.seconds)
        return ranks.ask(method, *args, **flags)

    return ask


def _launch(
    step: Step,
    options: argparse.Namespace,
    launched: Launches,
    folder: Folder,
    deadline: Deadline,
) -> list[str]:
    print(f"{step.name}: {step.question}", flush=True)
    for note in launched.notes:
        print(f"  {note}")
    limit = options.timeout
    return train(options.launch, launched, folder, deadline, first=step.seconds, limit=limit)


def _write(options: argparse.Namespace, folder: Folder, command: Sequence[str]) -> None:
    """The description and the page, of what there is."""
    stored = {step.name: folder.kept(step.name) for step in STEPS}
    measured = {name: one["times"] for name, one in stored.items() if one and "times" in one}
    failed = {name: one["failed"] for name, one in stored.items() if one and "failed" in one}
    trainings = trained(folder)
    facts: dict[str, Any] = folder.kept("machine") or {}
    if not measured and not trainings and not failed:
        return
    path, rows = None, []
    name = str(facts.get("device name"))
    base = options.base or described(name) or _BASES[options.device]
    if measured:
        path = folder.path / "measured.yaml"
        device = facts.get("device name", options.device)
        of = f"one of {options.ranks} ranks" if options.one_device else f"{options.ranks} ranks"
        source = (
            f"Measured by commfuse-npu measure: {of} on {device}, torch "
            f"{facts.get('torch')}, {facts.get('backend')}, shapes of {options.config}"
        )
        name = f"{of} on {device}, measured"
        with whole_file(path) as part:
            part.write_text(description(base, name, measured, facts, source), "utf-8")
        print(f"Written: {path}")
        rows = compared(Hardware.load(path), Hardware.load(find_config(base, "hardware")))
    said = (folder.kept("layer") or {}).get("said", [])
    shown = Shown(facts, measured, failed, rows, path, said, trainings, options.device)
    if (why := lacking()) is not None:
        print(f"No page: it {why}")
    else:
        page = folder.path / "measured.html"
        measured_page(page, command, shown)
        print(f"Written: {page}")
    for line in verdict_lines(shown):
        print(line.replace("**", "").replace("`", ""))


def _without_resume(given: Sequence[str]) -> list[str]:
    return [word for word in given if word != "--resume"]
