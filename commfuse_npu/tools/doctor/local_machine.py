"""The machine as the checks see it, and its NPUs and their links, as npu-smi reports them.

A machine is environment variables, a function that finds packages and one that runs commands:
tests define their own.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from commfuse_npu.launch.packages import Package, find_package

Level = Literal["ok", "note", "warning", "error"]


class Finding(NamedTuple):
    """One result of a check.

    ``error``: something will not work.  ``warning``: works, but not optimally.  ``note``: worth
    knowing.  ``ok``: as it should be.  ``advice``: what to do, and why.
    """

    what: str
    level: Level
    value: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f" -> {self.advice}" if self.advice else ""
        return f"{self.level:<7}  {self.what}: {self.value}{advice}"


ABSENT = 127
"""The exit code if there is no such command, as in a shell."""


class CommandResult(NamedTuple):
    """The exit code and the output of a command, or why it has none."""

    exit_code: int
    output: str

    @property
    def last_line(self) -> str:
        return (self.output.strip() or "no output").splitlines()[-1].strip()


# Several checks run the same command, and npu-smi is slow.
@functools.cache
def run_command(*command: str) -> CommandResult:
    """Run a command, for at most 60 s."""
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.run(command, text=True, errors="replace", timeout=60, **output)
    except FileNotFoundError:
        return CommandResult(ABSENT, f"there is no {command[0]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return CommandResult(1, str(error))
    return CommandResult(process.returncode, process.stdout)


@dataclass(frozen=True)
class LocalMachine:
    """What the checks need to know about a machine; ``find`` takes an import name.

    ``cann``: the folder of CANN unless a variable names another.
    """

    variables: Mapping[str, str]
    find: Callable[[str], Package | None]
    run: Callable[..., CommandResult] = run_command
    cann: Path = Path("/usr/local/Ascend/ascend-toolkit/latest")

    @classmethod
    def this(cls) -> LocalMachine:
        variables = dict(os.environ)
        return cls(variables, lambda name: find_package(name, variables))


# ------------------------------------------------------------------ NPUs and links

_INFO = ["npu-smi", "info"]
_TOPOLOGY = ["npu-smi", "info", "-t", "topo"]
_DRIVER = re.compile(r"^\|\s+npu-smi\s+\S+\s+Version:\s+(\S+)", re.MULTILINE)
# A device has two lines; the second has its bus address.
_NAME_LINE = re.compile(r"^\|\s+\d+\s+(\S+)\s+\|\s+([A-Za-z]+)\s+\|")
_BUS_LINE = re.compile(r"^\|\s+\d+(?:\s+\d+)?\s+\|\s+[0-9A-Fa-f]{4}:")
_FAST_LINKS = "HCCS", "HCCS_SW", "SIO"
"""A full mesh, a switch, and the two dies of a package."""


def listed_npus(machine: LocalMachine) -> list[tuple[str, str]]:
    """(name, health) of every NPU that ``npu-smi info`` lists, one per chip."""
    result = machine.run(*_INFO)
    npus: list[tuple[str, str]] = []
    npu = ("unknown", "unknown")
    for line in result.output.splitlines() if result.exit_code == 0 else ():
        if name := _NAME_LINE.match(line):
            npu = (name[1], name[2])
        elif _BUS_LINE.match(line):
            npus.append(npu)
    return npus


def check_devices(machine: LocalMachine) -> Iterator[Finding]:
    """Check the NPUs, their health and their links."""
    result = machine.run(*_INFO)
    if result.exit_code == ABSENT:
        advice = "the CPU form over gloo works: bash scripts/pretrain_llama_cpu.sh"
        yield Finding("NPUs", "note", "no NPU found (there is no npu-smi)", advice)
        return
    if driver := _DRIVER.search(result.output):
        yield Finding("driver", "ok", driver[1])
    devices = listed_npus(machine)
    if not devices:
        problem = f"npu-smi info lists none: {result.last_line}"
        advice = "check driver and firmware, and that the container was given devices"
        yield Finding("NPUs", "error", problem, advice)
        return
    kinds = Counter(name for name, _ in devices)
    yield Finding("NPUs", "ok", ", ".join(f"{count} x {name}" for name, count in kinds.items()))
    if ill := [f"{i} ({health})" for i, (_, health) in enumerate(devices) if health != "OK"]:
        advice = "see npu-smi info -t health"
        yield Finding("health", "warning", f"NPU {', '.join(ill)}", advice)
    yield check_links(machine)


def topology(machine: LocalMachine) -> dict[str, list[str]]:
    """By NPU: its link to each NPU (``X`` to itself), from ``npu-smi info -t topo``."""
    links = {}
    for line in machine.run(*_TOPOLOGY).output.splitlines():
        words = line.split()
        # The heading starts with NPU0 too, but holds names instead of links.
        if "X" in words and re.fullmatch(r"NPU\d+", words[0]):
            links[words[0]] = [word for word in words if re.fullmatch(r"X|[A-Z]{3}[A-Z_]*", word)]
    return links


def check_links(machine: LocalMachine) -> Finding:
    """Check the links between the NPUs."""
    rows = topology(machine).values()
    links = Counter(kind for row in rows for kind in row if kind != "X")
    if not links:
        answer = machine.run(*_TOPOLOGY).last_line
        return Finding("links", "note", f"unknown: npu-smi info -t topo said {answer}")
    pairs = ", ".join(f"{count // 2} pairs {kind}" for kind, count in links.most_common())
    if slow := ", ".join(kind for kind in links if kind not in _FAST_LINKS):
        advice = f"keep TP within NPUs on HCCS, HCCS_SW or SIO: {slow} goes over PCIe or the host"
        return Finding("links", "warning", pairs, advice)
    return Finding("links", "ok", pairs)
