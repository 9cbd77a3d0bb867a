"""``commfuse-npu doctor``: runs all checks and prints the report."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commfuse_npu.config_file import ConfigError, find_config
from commfuse_npu.tools.doctor.devices import check_devices, listed_npus
from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.doctor.versions import (
    check_cann,
    check_stack,
    check_torch,
    check_torch_npu_loads,
)
from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.option_types import Parser, refuse
from commfuse_npu.tools.plan.checks import check_launch
from commfuse_npu.tools.plan.launch import AskedLaunch, ask_about
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
        errors = dict.fromkeys(
            finding.subject for finding in self.findings if finding.level == "error"
        )
        return f"not ready: {', '.join(errors)} ({counted})"

    def as_text(self) -> str:
        """The findings, in Markdown."""
        lines = []
        for section in dict.fromkeys(finding.section for finding in self.findings):
            lines += ["", f"## {section}", ""]
            lines += [f"  {f}" for f in self.findings if f.section == section]
        return "\n".join(lines)

    def as_json(self) -> str:
        findings = [finding.as_json() for finding in self.findings]
        return json.dumps(
            {"ready": self.ready, "verdict": self.verdict, "findings": findings}, indent=2
        )


def diagnose(machine: Machine, launch: AskedLaunch | None = None) -> Report:
    """Run all checks; those of a launch only if there is one."""
    findings = [
        Finding("versions", "Python", "ok", ".".join(map(str, sys.version_info[:3]))),
        *check_torch(machine),
        *check_torch_npu_loads(machine),
        check_cann(machine),
        *check_stack(machine),
        *check_devices(machine, launch),
        *check_variables(machine, launch),
        *(check_launch(launch) if launch is not None else ()),
    ]
    npus = len(listed_npus(machine))
    if launch is not None:
        has = f"{npus} NPUs" if npus else "no NPU and can rehearse it"
        return Report(tuple(findings), f"{launch.name} would start; this machine has {has}")
    here = f"this machine can run CommFuse on {npus} NPUs"
    without = "this machine has no NPU and can run the CPU form, rehearsals and simulations"
    return Report(tuple(findings), here if npus else without)


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 ready, 1 something will not work, 2 invalid request."""
    parser = Parser(
        prog="commfuse-npu doctor",
        description="Is this machine ready for CommFuse, and for a launch?",
        epilog="After -- a launch: commfuse-npu doctor -- torchrun ... pretrain_gpt.py ..., or "
        "commfuse-npu doctor -- bash SCRIPT.sh, whose torchrun and python are stand-ins. What it "
        "would bring: commfuse-npu plan.",
    )
    parser.add_argument(
        "--config", help="of the launch: a yaml file, or its name in configs/: llama3_8b"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    # Split here, because versions of argparse treat the two dashes differently.
    end = list(words).index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:end]), words[end + 1 :]
    machine = Machine.this()
    try:
        config: Path | None = None if options.config is None else find_config(options.config)
        launch = ask_about(config, command, machine.variables) if config or command else None
    except (ConfigError, UsageError) as error:
        return refuse("doctor", error)
    report = diagnose(machine, launch)
    if options.json:
        print(report.as_json())
    else:
        print_verdict(report.verdict, report.ready)
        print(report.as_text())
    return 0 if report.ready else 1
