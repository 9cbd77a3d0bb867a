"""``commfuse-npu doctor``: runs all checks and prints the report."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.machine import Finding, Machine, check_devices, listed_npus
from commfuse_npu.tools.doctor.versions import (
    check_cann,
    check_stack,
    check_torch,
    check_torch_npu_loads,
)
from commfuse_npu.tools.option_types import Parser


class Report(NamedTuple):
    """Whether there are no errors; what the machine is ready for, or what is wrong; findings."""

    ready: bool
    verdict: str
    findings: Sequence[Finding]


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
    wrong = list(dict.fromkeys(f.what for f in findings if f.level == "error"))
    verdict = f"not ready: {', '.join(wrong)}"
    if not wrong:
        npus = len(listed_npus(machine))
        here = f"can run CommFuse on {npus} NPUs"
        without = "has no NPU and can run the CPU form, rehearsals and simulations"
        verdict = f"ready: this machine {here if npus else without}"
    count = Counter(finding.level for finding in findings)
    verdict += f" ({count['error']} errors, {count['warning']} warnings)"
    return Report(not wrong, verdict, findings)


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
        findings = [finding._asdict() for finding in report.findings]
        print(json.dumps(report._asdict() | {"findings": findings}, indent=2))
        return int(not report.ready)
    print(report.verdict)
    for section, found in groupby(report.findings, lambda finding: finding.section):
        print("", f"## {section}", "", *(f"  {finding}" for finding in found), sep="\n")
    return int(not report.ready)
