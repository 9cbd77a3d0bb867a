"""torch, torch_npu and CANN: are they there, and do they work with each other?"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from commfuse_npu.packages import NPU_TORCH, numbers
from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.machine import Machine

__all__ = ["TRY_TORCH_NPU", "check_cann", "check_torch", "check_torch_npu_loads"]

_about = partial(Finding, "versions")

TRY_TORCH_NPU = "import torch, torch_npu; print(); print('NPUs:', torch.npu.device_count())"
"""What a Python of its own is asked to do."""


def check_torch(machine: Machine) -> Iterator[Finding]:
    """torch, and torch_npu with it."""
    torch, npu = machine.find("torch"), machine.find("torch_npu")
    if torch is None:
        yield _about(
            "torch",
            "error",
            "not found",
            "2.1 or newer",
            "install torch, with a torch_npu of the same version for NPUs",
        )
        return
    version = torch.version or "unknown"
    if (0,) < numbers(version) < (2, 1):
        yield _about("torch", "error", version, "2.1 or newer", "install a newer one")
    else:
        yield _about("torch", "ok", version)
    if npu is None:
        yield _about("torch_npu", "note", "not found", action="needed on NPUs")
        return
    bridge = npu.version or "unknown"
    if numbers(bridge)[:3] != numbers(version)[:3]:
        yield _about(
            "torch_npu",
            "error",
            f"{bridge} beside torch {version}",
            "the version of torch",
            f"install torch {bridge} or torch_npu {version}",
        )
    elif machine.find("mindspeed_llm") is not None and numbers(version)[:3] != numbers(NPU_TORCH):
        yield _about(
            "torch_npu",
            "warning",
            f"{bridge} with MindSpeed-LLM",
            f"torch and torch_npu {NPU_TORCH}, which it is built for",
            f"install torch=={NPU_TORCH} and torch_npu=={NPU_TORCH}",
        )
    else:
        yield _about("torch_npu", "ok", bridge)


def check_torch_npu_loads(machine: Machine) -> Iterator[Finding]:
    """Whether torch_npu can be imported, and whether it breaks ``import torch`` if not."""
    if machine.find("torch_npu") is None:
        return
    automatic = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    variables = {**machine.variables, automatic: "0"}
    result = machine.run([sys.executable, "-c", TRY_TORCH_NPU], variables)
    if result is None:
        return
    if result.exit_code == 0:
        yield _about("import torch_npu", "ok", result.last_line)
        return
    on_npu = bool(listed_npus(machine))
    yield _about(
        "import torch_npu",
        "error" if on_npu else "warning",
        f"failed: {result.last_line}",
        "to work",
        "install CANN, and source its set_env.sh in this shell"
        if on_npu
        else "without NPUs use an environment that torch_npu is not in",
    )
    given = machine.variables.get(automatic, "unset")
    if given != "0":
        yield _about(
            automatic,
            "error",
            given,
            "0 while torch_npu cannot be imported: torch imports it by itself and fails",
            f"export {automatic}=0, or repair torch_npu",
        )


def check_cann(machine: Machine) -> Finding:
    """Whether CANN is there, its environment is set, and it is new enough."""
    about = partial(_about, "CANN")
    home = machine.variables.get("ASCEND_HOME_PATH") or machine.variables.get("ASCEND_TOOLKIT_HOME")
    if not home:
        if not machine.cann.exists():
            return about("note", "not found", action="needed on NPUs")
        return about(
            "error",
            f"in {machine.cann}, but ASCEND_HOME_PATH is unset",
            "its environment",
            f"source {machine.cann.parent / 'set_env.sh'}",
        )
    version = _cann_version(Path(home))
    if version is None:
        return about(
            "warning",
            f"no version in {home}",
            "ascend_*install.info below it",
            "check that ASCEND_HOME_PATH is the folder of the toolkit",
        )
    if numbers(version)[:2] < (8, 3):
        return about("warning", version, f"8.3 or newer, for torch_npu {NPU_TORCH}", "update it")
    if numbers(version)[:2] == (9, 0):
        return about(
            "warning",
            version,
            "8.5, or 9.1 and newer: hcomm 9.0 drops return codes of grouped transfers (read in "
            "hccl_group.cc:234, 274), so that a transfer that failed is reported as done",
            "update it, or leave --use-commfuse out; --commfuse-fb-overlap needs no such transfer",
        )
    return about("ok", version)


def _cann_version(home: Path) -> str | None:
    for pattern in ("ascend_*install.info", "*/ascend_*install.info", "version.info"):
        for path in sorted(home.glob(pattern)):
            found = re.search(r"^version=(.+)$", path.read_text("utf-8", "replace"), re.M | re.I)
            if found is not None:
                return found[1].strip()
    return None
