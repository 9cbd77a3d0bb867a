"""``commfuse-npu bench``: from the options to the report."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from commfuse_npu.config_file import find_config
from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.bench import plot, programme, stored
from commfuse_npu.tools.bench.arguments import parser
from commfuse_npu.tools.bench.page import bench_page
from commfuse_npu.tools.bench.report import as_markdown
from commfuse_npu.tools.bench.results import Result
from commfuse_npu.tools.bench.standing import verdict
from commfuse_npu.tools.bench.sweep import Conditions, Group
from commfuse_npu.tools.bench.variants import chosen
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.option_types import refuse
from commfuse_npu.tools.outputs import Output, write_outputs
from commfuse_npu.tools.report.drawing import draw
from commfuse_npu.tools.tell import tell

__all__ = ["main"]


class _Terminated(BaseException):
    """SIGTERM; raised so that the ranks are ended on the way out."""


def main(words: Sequence[str]) -> int:
    """Measure and print; returns the exit code: 0, 1 a rank failed, 2 bad options, 130 Ctrl-C."""
    given = parser().parse_args(words)
    if given.stored is not None:
        try:
            found = stored.load(given.stored)
        except (OSError, ValueError) as error:
            return refuse("bench", error)
        return _show(given, words, *found)
    try:
        given.config = find_config(given.config)
        sweeps = _programme(given)
    except ValueError as error:
        return refuse("bench", error)
    conditions = Conditions(
        given.config, given.scale, given.sequence, given.seed, given.device, given.timeout
    )
    possible = _possible(sweeps, conditions)
    results: list[Result] = []
    code = 0
    with _sigterm_raises():
        try:
            _measure(possible, conditions, results)
        except KeyboardInterrupt:
            conditions.note("interrupted; this is what was measured until then")
            code = 130
        except _Terminated:
            conditions.note("ended by SIGTERM; this is what was measured until then")
            code = 143
        except RuntimeError as error:
            print(f"commfuse-npu bench: {error}", file=sys.stderr)
            conditions.note("a rank failed; this is what was measured until then")
            code = 1
    if results or not code:
        code = _show(given, words, _machine(given, conditions), results, conditions.notes) or code
    return code


def _programme(given: argparse.Namespace) -> list[programme.Sweep]:
    for option, known in given.known.items():
        for word in getattr(given, option) or ():
            if word not in known:
                raise ValueError(f"--{option} {word}: choose from {', '.join(known)}")
    if given.device != "cpu" and given.sleep_gemm:
        raise ValueError("--sleep-gemm is for CPUs with fewer cores than ranks; leave it out")
    ModelConfig.load(given.config)
    sweeps = programme.with_options(programme.quick() if given.quick else programme.full(), given)
    for sweep in sweeps:
        chosen(sweep.variants, sweep.ranks)
    return sweeps


def _possible(sweeps: list[programme.Sweep], conditions: Conditions) -> list[programme.Sweep]:
    """Without sleeping GEMMs where there is a device; the report says where cores are few."""
    possible = []
    for sweep in sweeps:
        if conditions.device != "cpu" and sweep.gflops is not None:
            continue
        few_cores = conditions.device == "cpu" and sweep.ranks > (os.cpu_count() or 1)
        if sweep.gflops is None and few_cores:
            conditions.note(
                f"{sweep.ranks} ranks with real GEMMs share {os.cpu_count()} cores: their times "
                "are about sharing, not overlap; use --sleep-gemm"
            )
        possible.append(sweep)
    return possible


def _measure(sweeps: list[programme.Sweep], conditions: Conditions, results: list[Result]) -> None:
    try:
        # Consecutive sweeps of the same processes: starting them takes seconds.
        for ranks, same in groupby(sweeps, key=lambda sweep: sweep.ranks):
            with Group(ranks, conditions) as group:
                for sweep in same:
                    for result in group.run(sweep):
                        results.append(result)  # kept, whatever ends the run
    finally:
        tell("")


def _show(
    given: argparse.Namespace,
    words: Sequence[str],
    machine: dict[str, Any],
    results: list[Result],
    notes: list[str],
) -> int:
    """Print the tables, write the files that are asked for, and end with the verdict.

    Returns:
        2 if a file cannot be written.
    """
    print(as_markdown(machine, results, notes, given.all), flush=True)
    command = ["commfuse-npu", "bench", *words]
    drawn = given.plot if results else None
    page = given.html if results else None
    code = write_outputs(
        "bench",
        [
            Output(
                "--json",
                given.json,
                ": all figures",
                lambda path: write_json(path, stored.as_json(machine, results, notes), indent=1),
            ),
            Output(
                "--plot",
                drawn,
                ": pictures",
                lambda path: draw(plot.pictures(results, given.all), "Overlap benchmark", path),
            ),
            Output(
                "--html",
                page,
                ": a page for a browser",
                lambda path: bench_page(path, command, machine, results, notes, given.all),
            ),
        ],
    )
    if results:
        print("\n".join(verdict(results)).replace("**", "").replace("`", ""))
    return code


def _machine(given: argparse.Namespace, conditions: Conditions) -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "processor": _processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "device": given.device,
        "model": given.config.stem,
        "seed": given.seed,
        "link measured": conditions.wires,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
