"""Made-up machines, and helpers for the doctor's findings about them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from commfuse_npu.launch.packages import Package
from commfuse_npu.tools.doctor.doctor_command import diagnose
from commfuse_npu.tools.doctor.local_machine import ABSENT, CommandResult, LocalMachine
from commfuse_npu.tools.doctor.versions import TRY_TORCH_NPU

INFO_A2 = """\
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3197 / 65536         |
| 1     910B3               | Warning       | 91.3        33                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3197 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| No running processes found in NPU 0                                                            |
"""
INFO_A3 = """\
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
"""


def topology(links: Sequence[Sequence[str]]) -> str:
    heading = "        " + " ".join(f"NPU{i}" for i in range(len(links))) + " CPU Affinity\n"
    rows = [f"NPU{i}    {' '.join(row)}   0-23\n" for i, row in enumerate(links)]
    return heading + "".join(rows) + "Legend:\n  X = Self\n  HCCS = a link\n  PHB = a bridge\n"


Answers = Mapping[str, CommandResult]
NOTHING: Mapping[str, Any] = MappingProxyType({})


def machine(
    variables: Mapping[str, str] = NOTHING,
    packages: Mapping[str, Package] = NOTHING,
    answers: Answers = NOTHING,
    **others: Any,
) -> LocalMachine:
    """A machine with these facts only; ``answers`` has results by the end of a command line."""

    def run(*command: str) -> CommandResult:
        line = " ".join(command)
        absent = CommandResult(ABSENT, f"there is no {command[0]}")
        return next((answers[end] for end in answers if line.endswith(end)), absent)

    others.setdefault("cann", Path("/nowhere"))
    return LocalMachine(variables, packages.get, run, **others)


NPU_ANSWERS: Answers = {
    "npu-smi info": CommandResult(0, INFO_A2),
    "npu-smi info -t topo": CommandResult(0, topology([["X", "HCCS"], ["HCCS", "X"]])),
    TRY_TORCH_NPU: CommandResult(0, "a warning\n\nNPUs: 2\n"),
}


def stack(folder: Path) -> dict[str, Package]:
    """Packages of a supported set of checkouts, including torch and torch_npu."""
    for file in (
        "mindspeed_llm/tasks/megatron_adaptor_v2.py",
        "mindspeed/features_manager/features_manager.py",
        "megatron/core/__init__.py",
        "megatron/training/__init__.py",
    ):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
    versions = {"mindspeed_llm": "26.0.0dev0", "mindspeed": "0.12.1", "megatron": "0.12.1"}
    packages = {name: Package(version, (folder / name,)) for name, version in versions.items()}
    return packages | dict.fromkeys(("torch", "torch_npu"), Package("2.7.1"))


def found(host: LocalMachine) -> dict[str, str]:
    """The level and the value of every finding, by its subject."""
    _, findings = diagnose(host)
    by_subject = {finding.what: f"{finding.level} {finding.value}" for finding in findings}
    assert len(by_subject) == len(findings)
    return by_subject
