"""Checks torch, torch_npu, CANN, MindSpeed-LLM, MindSpeed and Megatron-LM, and their versions."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from commfuse_npu.launch.packages import (
    MEGATRON,
    NEWEST_CORE,
    NPU_TORCH,
    SUPPORTED_LLM,
    SUPPORTED_WITHOUT_LLM,
    TOGETHER,
    WITHOUT_LLM,
    numbers,
)
from commfuse_npu.tools.doctor.local_machine import Finding, Level, LocalMachine, listed_npus

TRY_TORCH_NPU = "import torch, torch_npu; print(); print('NPUs:', torch.npu.device_count())"
"""The program that a separate Python runs."""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def check_torch(machine: LocalMachine) -> Iterator[Finding]:
    """Check torch, and torch_npu with it."""
    torch = machine.find("torch")
    npu = machine.find("torch_npu")
    if torch is None:
        advice = "install torch 2.1 or newer, with a torch_npu of the same version for NPUs"
        yield Finding("torch", "error", "not found", advice)
        return
    version = torch.version or "unknown"
    if (0,) < numbers(version) < (2, 1):
        yield Finding("torch", "error", version, "install 2.1 or newer")
    else:
        yield Finding("torch", "ok", version)
    together = f"install torch=={NPU_TORCH} and torch_npu=={NPU_TORCH}"
    if npu is None:
        level: Level = "error" if listed_npus(machine) else "note"
        yield Finding("torch_npu", level, "not found", f"needed on NPUs: {together}")
        return
    bridge = npu.version or "unknown"
    if numbers(bridge)[:3] != numbers(version)[:3]:
        advice = f"install torch {bridge} or torch_npu {version}"
        yield Finding("torch_npu", "error", f"{bridge} beside torch {version}", advice)
    elif machine.find("mindspeed_llm") is not None and numbers(version)[:3] != numbers(NPU_TORCH):
        advice = f"{together}, which it is built for"
        yield Finding("torch_npu", "warning", f"{bridge} with MindSpeed-LLM", advice)
    else:
        yield Finding("torch_npu", "ok", bridge)


def check_torch_npu_loads(machine: LocalMachine) -> Iterator[Finding]:
    """Check if torch_npu can be imported, and if not, whether it breaks ``import torch``."""
    if machine.find("torch_npu") is None:
        return
    result = machine.run("env", f"{_AUTOLOAD}=0", sys.executable, "-c", TRY_TORCH_NPU)
    if result.exit_code == 0:
        yield Finding("import torch_npu", "ok", result.last_line)
        return
    level: Level = "warning"
    advice = "without NPUs use an environment that torch_npu is not in"
    if listed_npus(machine):
        level = "error"
        advice = "install CANN, and source its set_env.sh here"
    yield Finding("import torch_npu", level, f"failed: {result.last_line}", advice)
    setting = machine.variables.get(_AUTOLOAD, "unset")
    if setting != "0":
        advice = f"export {_AUTOLOAD}=0, or repair torch_npu: torch imports it by itself and fails"
        yield Finding(_AUTOLOAD, "error", setting, advice)


def check_cann(machine: LocalMachine) -> Finding:
    """Check that CANN is installed, its environment is set, and it is new enough."""
    home = machine.variables.get("ASCEND_HOME_PATH") or machine.variables.get("ASCEND_TOOLKIT_HOME")
    if not home and not machine.cann.exists():
        return Finding("CANN", "note", "not found", "needed on NPUs")
    if not home:
        text = f"in {machine.cann}, but ASCEND_HOME_PATH is unset"
        return Finding("CANN", "error", text, f"source {machine.cann.parent / 'set_env.sh'}")
    version = _cann_version(Path(home))
    if version is None:
        advice = "point ASCEND_HOME_PATH at the toolkit: ascend_*install.info is below it"
        return Finding("CANN", "warning", f"no version in {home}", advice)
    if numbers(version)[:2] == (9, 0):
        advice = (
            "update it to 9.1 or newer, or take 8.5: hcomm 9.0 drops return codes of grouped "
            "transfers (read in hccl_group.cc:234, 274), so that a transfer that failed is "
            "reported as done; or leave --use-commfuse out; --commfuse-overlap needs no such "
            "transfer"
        )
        return Finding("CANN", "warning", version, advice)
    if numbers(version) < (8, 3):
        advice = f"update it to 8.3 or newer, for torch_npu {NPU_TORCH}"
        return Finding("CANN", "warning", version, advice)
    return Finding("CANN", "ok", version)


def _cann_version(home: Path) -> str | None:
    for pattern in ("ascend_*install.info", "*/ascend_*install.info", "version.info"):
        for path in sorted(home.glob(pattern)):
            match = re.search(r"^version=(.+)$", path.read_text("utf-8", "replace"), re.M | re.I)
            if match is not None:
                return match[1].strip()
    return None


_STACK: dict[str, tuple[str, str, tuple[str, ...], Level]] = {
    # 26.0.0, 26.1.0 and master all have the version 26.0.0dev0.
    "mindspeed_llm": ("MindSpeed-LLM", "tasks/megatron_adaptor_v2.py", SUPPORTED_LLM, "warning"),
    "mindspeed": ("MindSpeed", "features_manager/features_manager.py", ("0.12",), "error"),
    "megatron": ("Megatron-LM", "training", (MEGATRON,), "error"),
}
"""By import name: the title, what a usable copy has, supported versions, the level of others."""


def check_stack(machine: LocalMachine) -> Iterator[Finding]:
    """Check MindSpeed-LLM, MindSpeed and Megatron-LM."""
    packages = {name: machine.find(name) for name in _STACK}
    mindspeed = packages["mindspeed"]
    on_npu = packages["mindspeed_llm"] is not None or mindspeed is not None
    without_llm = (
        packages["mindspeed_llm"] is None
        and mindspeed is not None
        and _fits(numbers(mindspeed.version or ""), SUPPORTED_WITHOUT_LLM, with_mindspeed=True)
    )
    for name, (title, part, versions, otherwise) in _STACK.items():
        package = packages[name]
        level = otherwise
        text = "not found"
        advice = f"use {TOGETHER}, on PYTHONPATH"
        if without_llm:
            versions = SUPPORTED_WITHOUT_LLM
            advice = f"use {WITHOUT_LLM}, on PYTHONPATH"
        if package is None and without_llm and name == "mindspeed_llm":
            level = "note"
            advice = "there is none for this MindSpeed"
        elif package is None and not on_npu:
            level = "note"
            advice = "needed on NPUs"
            if name == "megatron":
                advice = "pip install megatron-core==0.12.1 for the CPU"
        elif package is not None:
            text = package.version or "unknown"
            if on_npu and package.folder_with(part) is None:
                level = "error"
                text = f"{text}, without {part}"
            # Without a version number, its files decide.
            elif not package.version or _fits(numbers(text), versions, on_npu):
                level = "ok"
                advice = ""
        yield Finding(title, level, text, advice)


def _fits(version: tuple[int, ...], supported: Sequence[str], with_mindspeed: bool) -> bool:
    """Whether a version begins with a supported one; alone, newer cores of Megatron fit, too."""
    if not with_mindspeed:
        return numbers(MEGATRON) <= version and version[:2] <= NEWEST_CORE
    return any(version[: len(known)] == known for known in map(numbers, supported))
