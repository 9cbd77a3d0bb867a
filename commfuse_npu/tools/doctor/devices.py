"""The NPUs of a machine and their links, as npu-smi reports them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial

from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.machine import ABSENT, Machine

__all__ = ["check_devices", "check_links", "listed_npus", "topology"]

_finding = partial(Finding, "devices")
_INFO, _TOPOLOGY = ["npu-smi", "info"], ["npu-smi", "info", "-t", "topo"]
_DRIVER = re.compile(r"^\|\s+npu-smi\s+\S+\s+Version:\s+(\S+)", re.MULTILINE)
# A device has two lines; the second has its bus address.
_NAME_LINE = re.compile(r"^\|\s+\d+\s+(\S+)\s+\|\s+([A-Za-z]+)\s+\|")
_BUS_LINE = re.compile(r"^\|\s+\d+(?:\s+\d+)?\s+\|\s+[0-9A-Fa-f]{4}:")
_FAST_LINKS = "HCCS", "HCCS_SW", "SIO"
"""A full mesh, a switch, and the two dies of a package."""


def listed_npus(machine: Machine) -> list[tuple[str, str]]:
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


def check_devices(machine: Machine) -> Iterator[Finding]:
    """Check the NPUs, their health and their links."""
    result = machine.run(*_INFO)
    if result.exit_code == ABSENT:
        none, action = "no NPU found (there is no npu-smi)", "bash scripts/pretrain_llama_cpu.sh"
        yield _finding("NPUs", "note", none, action=f"the CPU form over gloo works: {action}")
        return
    if driver := _DRIVER.search(result.output):
        yield _finding("driver", "ok", driver[1])
    devices = listed_npus(machine)
    if not devices:
        problem = f"npu-smi info lists none: {result.last_line}"
        action = "check driver and firmware, and that the container was given devices"
        yield _finding("NPUs", "error", problem, "a device", action)
        return
    kinds = Counter(name for name, _ in devices)
    yield _finding("NPUs", "ok", ", ".join(f"{count} x {name}" for name, count in kinds.items()))
    if ill := [f"{i} ({health})" for i, (_, health) in enumerate(devices) if health != "OK"]:
        advice = "see npu-smi info -t health"
        yield _finding("health", "warning", f"NPU {', '.join(ill)}", "OK", advice)
    yield check_links(machine)


def topology(machine: Machine) -> dict[str, list[str]]:
    """By NPU: its link to each NPU (``X`` to itself), from ``npu-smi info -t topo``."""
    links = {}
    for line in machine.run(*_TOPOLOGY).output.splitlines():
        words = line.split()
        # The heading starts with NPU0 too, but holds names instead of links.
        if "X" in words and re.fullmatch(r"NPU\d+", words[0]):
            links[words[0]] = [word for word in words if re.fullmatch(r"X|[A-Z]{3}[A-Z_]*", word)]
    return links


def check_links(machine: Machine) -> Finding:
    """Check the links between the NPUs."""
    rows = topology(machine).values()
    links = Counter(kind for row in rows for kind in row if kind != "X")
    if not links:
        answer = machine.run(*_TOPOLOGY).last_line
        return _finding("links", "note", f"unknown: npu-smi info -t topo said {answer}")
    pairs = ", ".join(f"{count // 2} pairs {kind}" for kind, count in links.most_common())
    if slow := ", ".join(kind for kind in links if kind not in _FAST_LINKS):
        expected = "HCCS, HCCS_SW or SIO within a tensor-parallel group"
        action = f"{slow} goes over PCIe or the host: keep TP within the NPUs that HCCS connects"
        return _finding("links", "warning", pairs, expected, action)
    return _finding("links", "ok", pairs)
