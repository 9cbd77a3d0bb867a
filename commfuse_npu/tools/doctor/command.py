"""``commfuse-npu doctor``: the options, and the report on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_npu.config_file import ConfigError, find_config
from commfuse_npu.tools.doctor.launch import read_launch
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.doctor.report import diagnose
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.option_types import Parser, refuse

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 ready, 1 something will not work, 2 invalid request."""
    parser = Parser(
        prog="commfuse-npu doctor",
        description="Is this machine, and this launch, ready for CommFuse?",
        epilog="After -- a launch: commfuse-npu doctor -- torchrun ... pretrain_gpt.py ..., or "
        "commfuse-npu doctor -- bash SCRIPT.sh, whose torchrun and python are stand-ins.",
    )
    parser.add_argument(
        "--config", help="of the launch: a yaml file, or its name in configs/: llama3_8b"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    # Split here: versions of argparse differ in what they leave of the two dashes.
    at = list(words).index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:at])
    machine = Machine.this()
    try:
        config = None if given.config is None else find_config(given.config)
        launch = read_launch(config, words[at + 1 :], machine.variables)
    except (ConfigError, UsageError) as error:
        return refuse("doctor", error)
    report = diagnose(machine, launch)
    print(report.as_json() if given.json else report.as_text())
    return 0 if report.ready else 1
