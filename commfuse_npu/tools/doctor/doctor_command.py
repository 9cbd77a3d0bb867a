"""``commfuse-npu doctor``: runs all checks and prints the report."""

import sys
from collections import Counter
from collections.abc import Sequence

from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.local_machine import (
    Finding,
    LocalMachine,
    check_devices,
    listed_npus,
)
from commfuse_npu.tools.doctor.versions import (
    check_cann,
    check_stack,
    check_torch,
    check_torch_npu_loads,
)
from commfuse_npu.tools.option_types import Parser


def diagnose(machine: LocalMachine) -> tuple[str, list[Finding]]:
    """What the machine is ready for, or what is wrong; all findings."""
    findings = [
        Finding("Python", "ok", ".".join(map(str, sys.version_info[:3]))),
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
    return f"{verdict} ({count['error']} errors, {count['warning']} warnings)", findings


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 ready, 1 something will not work, 2 invalid request."""
    Parser(
        prog="commfuse-npu doctor",
        description="Is this machine ready for CommFuse: versions, NPUs, environment variables?",
        epilog="Whether a launch would start, and what it would bring: commfuse-npu plan.",
    ).parse_args(words)
    verdict, findings = diagnose(LocalMachine.this())
    print(verdict, "", *findings, sep="\n")
    return int(any(finding.level == "error" for finding in findings))
