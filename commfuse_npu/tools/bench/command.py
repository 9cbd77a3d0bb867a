"""``commfuse-npu bench``: from the options to the report."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.bench import namespaces, plot, programme, stored
from commfuse_npu.tools.bench.arguments import parser
from commfuse_npu.tools.bench.processes import RanksError
from commfuse_npu.tools.bench.progress import Progress
from commfuse_npu.tools.bench.report import as_json, as_markdown
from commfuse_npu.tools.bench.results import Result
from commfuse_npu.tools.bench.sweep import Conditions, Group, steps_of
from commfuse_npu.tools.bench.variants import chosen
from commfuse_npu.tools.config_file import ConfigError, find_config
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["main"]

_QUICK_SECONDS, _FULL_SECONDS = 150.0, 1320.0
"""What a run may take with its repetitions of disturbed rounds."""


class _Terminated(BaseException):
    """SIGTERM; raised so that the ranks are ended on the way out."""


def main(words: Sequence[str]) -> int:
    """Measure and print; returns the exit code: 0, 1 a rank failed, 2 bad options, 130 Ctrl-C."""
    given = parser().parse_args(words)
    if given.stored is not None:
        return _show_again(given)
    try:
        given.config = find_config(given.config)
        sweeps = _programme(given)
    except (ValueError, ConfigError) as error:
        print(f"commfuse-npu bench: {error}", file=sys.stderr)
        return 2
    limit = _QUICK_SECONDS if given.quick else _FULL_SECONDS
    conditions = Conditions(
        given.config,
        given.scale,
        given.sequence,
        given.seed,
        given.device,
        given.timeout,
        limit,
    )
    results: list[Result] = []
    code = 0
    with _sigterm_raises():
        try:
            _measure(_possible(sweeps, conditions), conditions, results)
        except KeyboardInterrupt:
            conditions.note("interrupted; this is what was measured until then")
            code = 130
        except _Terminated:
            conditions.note("ended by SIGTERM; this is what was measured until then")
            code = 143
        except (RanksError, RuntimeError) as error:
            print(f"commfuse-npu bench: {error}", file=sys.stderr)
            conditions.note("a rank failed; this is what was measured until then")
            code = 1
    if results or not code:
        machine, notes = _machine(given, conditions), conditions.notes
        code = _show(given, machine, results, notes) or code
    return code


def _show_again(given: argparse.Namespace) -> int:
    try:
        machine, results, notes = stored.load(given.stored)
    except (OSError, ValueError) as error:
        print(f"commfuse-npu bench: {error}", file=sys.stderr)
        return 2
    return _show(given, machine, results, notes)


def _programme(given: argparse.Namespace) -> list[programme.Sweep]:
    for option, known in given.known.items():
        for word in getattr(given, option) or ():
            if word not in known:
                raise ValueError(f"--{option} {word}: choose from {', '.join(known)}")
    if given.device == "npu" and given.sleep_gemm:
        raise ValueError("--sleep-gemm is for CPUs with fewer cores than ranks; leave it out")
    for file in (given.json, given.plot):
        if file is not None and not file.resolve().parent.is_dir():
            raise ValueError(f"{file}: there is no folder {file.resolve().parent}")
    if given.plot and util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install matplotlib, or leave it out")
    ModelConfig.load(given.config)
    sweeps = programme.with_options(
        programme.quick() if given.quick else programme.full(),
        ranks=given.ranks,
        works=given.works,
        ratios=given.ratios,
        variants=given.variants,
        dtypes=given.dtypes,
        links=given.links,
        rounds=given.rounds,
        gflops=given.sleep_gemm,
    )
    for sweep in sweeps:
        chosen(sweep.variants, sweep.ranks)
    return sweeps


def _possible(sweeps: list[programme.Sweep], conditions: Conditions) -> list[programme.Sweep]:
    """Without those whose link cannot be had here; the report says which and why."""
    possible = []
    problem: str | None = None
    for sweep in sweeps:
        if conditions.device != "cpu" and (sweep.gflops is not None or sweep.link != "mesh"):
            continue  # sleeping GEMMs and made up links are for CPUs
        if sweep.link in ("shared-nic", "mesh-tc"):
            problem = namespaces.why_not() if problem is None else problem
            if problem:
                conditions.note(f"skipped: {programme.LINKS[sweep.link]}: {problem}")
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
    progress = Progress(sum(map(steps_of, sweeps)))
    try:
        # Consecutive sweeps of the same processes: starting them takes seconds.
        for (ranks, link), same in groupby(sweeps, key=lambda sweep: (sweep.ranks, sweep.link)):
            with Group(ranks, link, conditions, progress) as group:
                for sweep in same:
                    for result in group.run(sweep):
                        results.append(result)
    finally:
        progress.close()


def _show(
    given: argparse.Namespace, machine: dict[str, Any], results: list[Result], notes: list[str]
) -> int:
    """Print the tables, and write the files that are asked for; 1 if one cannot be written."""
    print(as_markdown(machine, results, notes), flush=True)
    code = 0
    try:
        if given.json:
            write_json(given.json, as_json(machine, results, notes), indent=1)
    except OSError as error:
        code = _unwritten("--json", given.json, error)
    try:
        if given.plot and results:
            plot.draw(results, given.plot)
    except OSError as error:
        code = _unwritten("--plot", given.plot, error)
    return code


def _unwritten(option: str, path: Path, error: OSError) -> int:
    print(
        f"commfuse-npu bench: {option} {path} was not written: {error.strerror or error}; the "
        "results are above",
        file=sys.stderr,
    )
    return 1


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
