"""Python, torch, torch_npu and CANN: are they there, and do they work with each other?"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding, about
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.doctor.versions import NPU_TORCH, numbers

__all__ = ["TRY_TORCH_NPU", "check_cann", "check_python", "check_torch", "check_torch_npu_loads"]

_about = about("versions")

TRY_TORCH_NPU = "import torch, torch_npu; print(); print('NPUs:', torch.npu.device_count())"
"""What a Python of its own is asked to do."""

_IMPORT = "import torch, torch_npu; print(); print('NPUs:', torch.npu.device_count())"


def check_python(machine: Machine) -> list[Finding]:
    version = ".".join(map(str, machine.python))
    if machine.python < (3, 10):
        return [_about("Python", "error", version, "3.10 or newer", "use a newer one")]
    return [_about("Python", "ok", version)]


def check_torch(machine: Machine) -> list[Finding]:
    """torch, and torch_npu with it."""
    torch, npu = machine.find("torch"), machine.find("torch_npu")
    if torch is None:
        return [
            _about(
                "torch",
                "error",
                "not found",
                "2.1 or newer",
                "install torch, with a torch_npu of the same version for NPUs",
            )
        ]
    version = torch.version or "unknown"
    old = (0,) < numbers(version) < (2, 1)
    found = [
        _about("torch", "error", version, "2.1 or newer", "install a newer one")
        if old
        else _about("torch", "ok", version)
    ]
    if npu is None:
        found.append(_about("torch_npu", "note", "not found", action="needed on NPUs"))
        return found
    bridge = npu.version or "unknown"
    if numbers(bridge)[:3] != numbers(version)[:3]:
        found.append(
            _about(
                "torch_npu",
                "error",
                f"{bridge} beside torch {version}",
                "the version of torch",
                f"install torch {bridge} or torch_npu {version}",
            )
        )
        return found
    if machine.find("mindspeed_llm") is not None and numbers(version)[:3] != numbers(NPU_TORCH):
        found.append(
            _about(
                "torch_npu",
                "warning",
                f"{bridge} with MindSpeed-LLM",
                f"torch and torch_npu {NPU_TORCH}, which it is built for",
                f"install torch=={NPU_TORCH} and torch_npu=={NPU_TORCH}",
            )
        )
    else:
        found.append(_about("torch_npu", "ok", bridge))
    return found


def check_torch_npu_loads(machine: Machine) -> list[Finding]:
    """Whether torch_npu can be imported, and whether it breaks ``import torch`` if not."""
    if machine.find("torch_npu") is None:
        return []
    variables = {**machine.variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = machine.run([sys.executable, "-c", TRY_TORCH_NPU], variables)
    if result is None:
        return []
    if result.exit_code == 0:
        return [_about("import torch_npu", "ok", result.last_line)]
    on_npu = bool(listed_npus(machine))
    found = [
        _about(
            "import torch_npu",
            "error" if on_npu else "warning",
            f"failed: {result.last_line}",
            "to work",
            "install CANN, and source its set_env.sh in this shell"
            if on_npu
            else "without NPUs use an environment that torch_npu is not in",
        )
    ]
    if machine.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        found.append(
            _about(
                "TORCH_DEVICE_BACKEND_AUTOLOAD",
                "error",
                machine.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "unset"),
                "0 while torch_npu cannot be imported: torch imports it by itself and fails",
                "export TORCH_DEVICE_BACKEND_AUTOLOAD=0, or repair torch_npu",
            )
        )
    return found


def check_cann(machine: Machine) -> list[Finding]:
    home = machine.variables.get("ASCEND_HOME_PATH") or machine.variables.get("ASCEND_TOOLKIT_HOME")
    if not home:
        if not machine.cann.exists():
            return [_about("CANN", "note", "not found", action="needed on NPUs")]
        return [
            _about(
                "CANN",
                "error",
                f"in {machine.cann}, but ASCEND_HOME_PATH is unset",
                "its environment",
                f"source {machine.cann.parent / 'set_env.sh'}",
            )
        ]
    version = _cann_version(Path(home))
    if version is None:
        return [
            _about(
                "CANN",
                "warning",
                f"no version in {home}",
                "ascend_*install.info below it",
                "check that ASCEND_HOME_PATH is the folder of the toolkit",
            )
        ]
    if numbers(version)[:2] < (8, 3):
        return [
            _about(
                "CANN", "warning", version, f"8.3 or newer, for torch_npu {NPU_TORCH}", "update it"
            )
        ]
    return [_about("CANN", "ok", version)]


def _cann_version(home: Path) -> str | None:
    for pattern in ("ascend_*install.info", "*/ascend_*install.info", "version.info"):
        for path in sorted(home.glob(pattern)):
            found = re.search(r"^version=(.+)$", path.read_text("utf-8", "replace"), re.M | re.I)
            if found is not None:
                return found[1].strip()
    return None
