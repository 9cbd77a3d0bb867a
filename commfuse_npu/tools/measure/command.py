"""``commfuse-npu measure``: what the simulator assumes of this machine, measured."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.whole_file import whole_file
from commfuse_npu.tools.bench.processes import Ranks, RanksError
from commfuse_npu.tools.config_file import ConfigError, find_config
from commfuse_npu.tools.measure.description import description
from commfuse_npu.tools.measure.folder import Folder, FolderError
from commfuse_npu.tools.measure.layer import layer_times
from commfuse_npu.tools.measure.page import compared, measured_page
from commfuse_npu.tools.measure.steps import STEPS, Scale, Step, Times
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import Parser, positive, refuse, whole, words
from commfuse_npu.tools.report.drawing import lacking
from commfuse_npu.tools.simulate.hardware import Hardware

__all__ = ["main"]

_WORKER = "commfuse_npu.tools.measure.worker:Worker"
_BASES = {
    "cpu": "cpu_paced",
    "cuda": "cpu_paced",
    "npu": "ascend_910b_server",
}
"""Whose peaks and unmeasured figures hold, by device, where --base names no other."""


def main(given: Sequence[str]) -> int:
    """Measure; returns the exit code: 0 all, 1 not all, 2 bad options, 130 Ctrl-C."""
    options = _parser().parse_args(given)
    try:
        scale = _scale(options)
        base = options.base or _BASES[options.device]
        find_config(base, "hardware")
        about = {"device": options.device, "ranks": options.ranks, "config": options.config}
        folder = Folder(options.folder, {**about, "base": base}, resume=options.resume)
    except (ConfigError, FolderError, OSError) as error:
        return refuse("measure", error)
    command = ["commfuse-npu", "measure", *given]
    try:
        failed = _measure(options, scale, folder)
        code = 1 if failed else 0
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept", file=sys.stderr)
        code = 130
    _write(options, folder, base, command)
    if code:
        print(f"Go on with: commfuse-npu measure --resume {' '.join(_without_resume(given))}")
    return code


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
        "--config", default="llama3_8b", help="whose layers; a yaml file, or its name in configs/"
    )
    parser.add_argument(
        "--base",
        metavar="DESCRIPTION",
        help="in configs/hardware: peaks, and figures that are not measured",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("measured"), help="for all files; default %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    parser.add_argument("--steps", type=words, help="only these, in the order of the list below")
    parser.add_argument(
        "--minutes", type=positive, default=55.0, help="no step begins after; default %(default)g"
    )
    parser.add_argument(
        "--timeout", type=positive, metavar="SECONDS", help="for one question; default the step's"
    )
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    known = [step.name for step in STEPS]
    for name in options.steps or ():
        if name not in known:
            raise FolderError(f"--steps {name}: choose from {', '.join(known)}")
    config = ModelConfig.load(find_config(options.config))
    return Scale.of(config, options.ranks, options.device)


def _measure(options: argparse.Namespace, scale: Scale, folder: Folder) -> list[str]:
    """Returns the steps that failed or were left out."""
    end = time.monotonic() + 60 * options.minutes
    left = []
    ranks: Ranks | None = None
    try:
        for step in STEPS:
            if options.steps and step.name not in options.steps:
                continue
            known = folder.kept(step.name)
            if known is not None and "times" in known:
                print(f"{step.name}: kept, {len(known['times'])} times")
                continue
            if time.monotonic() > end:
                print(f"{step.name}: left out, {options.minutes:g} minutes are over")
                left.append(step.name)
                continue
            print(f"{step.name}: {step.question}", flush=True)
            try:
                if step.ask is None:
                    # They would be in the way of others.
                    _end(ranks)
                    ranks = None
                    _layer(step, options, scale, folder)
                else:
                    ranks = ranks or _started(options, folder)
                    ranks.timeout = options.timeout or step.seconds
                    _keep(step, folder, step.ask(ranks.ask, scale))
            except RanksError as error:
                # They have been ended; the next step begins with new ones.
                ranks = None
                folder.keep(step.name, {"failed": str(error)})
                print(f"{step.name}: failed: {str(error).splitlines()[-1]}", file=sys.stderr)
                left.append(step.name)
    finally:
        _end(ranks)
    return left


def _end(ranks: Ranks | None) -> None:
    if ranks is not None:
        ranks.close()


def _started(options: argparse.Namespace, folder: Folder) -> Ranks:
    seconds = options.timeout or max(step.seconds for step in STEPS)
    ranks = Ranks(options.ranks, device=options.device, timeout=seconds, worker=_WORKER)
    ranks.__enter__()
    first, *others = ranks.ask("machine")
    differing = [key for key in first if any(one.get(key) != first[key] for one in others)]
    folder.keep("machine", {**first, "not the same on all ranks": differing})
    return ranks


def _layer(step: Step, options: argparse.Namespace, scale: Scale, folder: Folder) -> None:
    limit = options.timeout or step.seconds
    times, said = layer_times(scale, options.config, options.device, limit)
    _keep(step, folder, times, said)


def _keep(step: Step, folder: Folder, times: Times, said: Sequence[str] = ()) -> None:
    folder.keep(step.name, {"question": step.question, "times": times, "said": list(said)})
    print(f"{step.name}: {len(times)} times", flush=True)


def _write(options: argparse.Namespace, folder: Folder, base: str, command: Sequence[str]) -> None:
    """The description and the page, of what there is."""
    stored = {step.name: folder.kept(step.name) for step in STEPS}
    measured = {name: one["times"] for name, one in stored.items() if one and "times" in one}
    failed = {name: one["failed"] for name, one in stored.items() if one and "failed" in one}
    if not measured:
        return
    facts: dict[str, Any] = folder.kept("machine") or {}
    device = facts.get("device name", options.device)
    source = (
        f"Measured by commfuse-npu measure: {options.ranks} ranks on {device}, torch "
        f"{facts.get('torch')}, {facts.get('backend')}, shapes of {options.config}"
    )
    name = f"{options.ranks} ranks on {device}, measured"
    path = folder.path / "measured.yaml"
    with whole_file(path) as part:
        part.write_text(description(base, name, measured, facts, source), "utf-8")
    print(f"Written: {path}")
    if lacking() is not None:
        print(f"No page: it {lacking()}")
        return
    page = folder.path / "measured.html"
    rows = compared(Hardware.load(path), Hardware.load(find_config(base, "hardware")))
    said = (folder.kept("layer") or {}).get("said", [])
    measured_page(page, command, facts, measured, failed, rows, str(path), said)
    print(f"Written: {page}")


def _without_resume(given: Sequence[str]) -> list[str]:
    return [word for word in given if word != "--resume"]
