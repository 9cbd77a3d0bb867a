"""``commfuse-npu doctor``: runs all checks and prints the report."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.machine import Finding, Machine, check_devices, listed_npus
from commfuse_npu.tools.doctor.versions import (
    check_cann,
    check_stack,
    check_torch,
    check_torch_npu_loads,
)
from commfuse_npu.tools.option_types import Parser
from commfuse_npu.tools.terminal import print_verdict

__all__ = ["Report", "diagnose", "main"]


@dataclass(frozen=True)
class Report:
    """All findings, and what the machine is ready for if there are no errors."""

    findings: tuple[Finding, ...]
    ready_for: str = ""

    @property
    def ready(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """What the machine is ready for, or what is wrong."""
        count = Counter(finding.level for finding in self.findings)
        counted = f"{count['error']} errors, {count['warning']} warnings"
        if self.ready:
            return f"ready: {self.ready_for} ({counted})"
        wrong = dict.fromkeys(f.what for f in self.findings if f.level == "error")
        return f"not ready: {', '.join(wrong)} ({counted})"

    def as_text(self) -> str:
        """The findings, in Markdown."""
        lines = []
        for section in dict.fromkeys(finding.section for finding in self.findings):
            lines += ["", f"## {section}", ""]
            lines += [f"  {f}" for f in self.findings if f.section == section]
        return "\n".join(lines)

    def as_json(self) -> str:
        findings = [finding._asdict() for finding in self.findings]
        return json.dumps(
            {"ready": self.ready, "verdict": self.verdict, "findings": findings}, indent=2
        )


def diagnose(machine: Machine) -> Report:
    """Run all checks."""
    findings = [
        Finding("versions", "Python", "ok", ".".join(map(str, sys.version_info[:3]))),
        *check_torch(machine),
        *check_torch_npu_loads(machine),
        check_cann(machine),
        *check_stack(machine),
        *check_devices(machine),
        *check_variables(machine),
    ]
    npus = len(listed_npus(machine))
    here = f"this machine can run CommFuse on {npus} NPUs"
    without = "this machine has no NPU and can run the CPU form, rehearsals and simulations"
    return Report(tuple(findings), here if npus else without)


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 ready, 1 something will not work, 2 invalid request."""
    parser = Parser(
        prog="commfuse-npu doctor",
        description="Is this machine ready for CommFuse: versions, NPUs, environment variables?",
        epilog="Whether a launch would start, and what it would bring: commfuse-npu plan.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(words)
    report = diagnose(Machine.this())
    if options.json:
        print(report.as_json())
    else:
        print_verdict(report.verdict, report.ready)
        print(report.as_text())
    return 0 if report.ready else 1
