"""``commfuse-npu doctor``: the options, and the report on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.doctor.launch import read_launch
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.doctor.report import diagnose

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 ready, 1 something will not work, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="commfuse-npu doctor",
        description="Is this machine, and this launch, ready for CommFuse?",
        epilog="After -- a command line of pretrain_gpt.py: commfuse-npu doctor -- torchrun ...",
    )
    parser.add_argument("--config", type=Path, help="of the launch: configs/llama3_8b.yaml")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    # Split here: versions of argparse differ in what they leave of the two dashes.
    at = list(words).index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:at])
    machine = Machine.this()
    try:
        launch = read_launch(given.config, words[at + 1 :], machine.variables)
    except ConfigError as error:
        print(f"commfuse-npu doctor: {error}", file=sys.stderr)
        return 2
    report = diagnose(machine, launch)
    print(report.as_json() if given.json else report.as_text())
    return 0 if report.ready else 1
