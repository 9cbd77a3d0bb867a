"""Checks torch, torch_npu, CANN, MindSpeed-LLM, MindSpeed and Megatron-LM, and their versions."""

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from commfuse_npu.packages import (
    MEGATRON,
    NPU_TORCH,
    SUPPORTED_LLM,
    TOGETHER,
    WHY_WITHOUT,
    WITHOUT_MINDSPEED,
    Package,
    numbers,
)
from commfuse_npu.tools.doctor.machine import Finding, Level, Machine, listed_npus

TRY_TORCH_NPU = "import torch, torch_npu; print(); print('NPUs:', torch.npu.device_count())"
"""The program that a separate Python runs."""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_finding = partial(Finding, "versions")


def check_torch(machine: Machine) -> Iterator[Finding]:
    """Check torch, and torch_npu with it."""
    torch, npu = machine.find("torch"), machine.find("torch_npu")
    if torch is None:
        advice = "install torch 2.1 or newer, with a torch_npu of the same version for NPUs"
        yield _finding("torch", "error", "not found", advice)
        return
    version = torch.version or "unknown"
    if (0,) < numbers(version) < (2, 1):
        yield _finding("torch", "error", version, "install 2.1 or newer")
    else:
        yield _finding("torch", "ok", version)
    together = f"install torch=={NPU_TORCH} and torch_npu=={NPU_TORCH}"
    if npu is None:
        level: Level = "error" if listed_npus(machine) else "note"
        yield _finding("torch_npu", level, "not found", f"needed on NPUs: {together}")
        return
    bridge = npu.version or "unknown"
    if numbers(bridge)[:3] != numbers(version)[:3]:
        advice = f"install torch {bridge} or torch_npu {version}"
        yield _finding("torch_npu", "error", f"{bridge} beside torch {version}", advice)
    elif machine.find("mindspeed_llm") is not None and numbers(version)[:3] != numbers(NPU_TORCH):
        advice = f"{together}, which it is built for"
        yield _finding("torch_npu", "warning", f"{bridge} with MindSpeed-LLM", advice)
    else:
        yield _finding("torch_npu", "ok", bridge)


def check_torch_npu_loads(machine: Machine) -> Iterator[Finding]:
    """Check if torch_npu can be imported, and if not, whether it breaks ``import torch``."""
    if machine.find("torch_npu") is None:
        return
    result = machine.run("env", f"{_AUTOLOAD}=0", sys.executable, "-c", TRY_TORCH_NPU)
    if result.exit_code == 0:
        yield _finding("import torch_npu", "ok", result.last_line)
        return
    level: Level = "warning"
    advice = "without NPUs use an environment that torch_npu is not in"
    if listed_npus(machine):
        level, advice = "error", "install CANN, and source its set_env.sh here"
    yield _finding("import torch_npu", level, f"failed: {result.last_line}", advice)
    setting = machine.variables.get(_AUTOLOAD, "unset")
    if setting != "0":
        advice = f"export {_AUTOLOAD}=0, or repair torch_npu: torch imports it by itself and fails"
        yield _finding(_AUTOLOAD, "error", setting, advice)


def check_cann(machine: Machine) -> Finding:
    """Check that CANN is installed, its environment is set, and it is new enough."""
    home = machine.variables.get("ASCEND_HOME_PATH") or machine.variables.get("ASCEND_TOOLKIT_HOME")
    if not home and not machine.cann.exists():
        return _finding("CANN", "note", "not found", "needed on NPUs")
    if not home:
        text = f"in {machine.cann}, but ASCEND_HOME_PATH is unset"
        return _finding("CANN", "error", text, f"source {machine.cann.parent / 'set_env.sh'}")
    version = _cann_version(Path(home))
    if version is None:
        advice = "point ASCEND_HOME_PATH at the toolkit: ascend_*install.info is below it"
        return _finding("CANN", "warning", f"no version in {home}", advice)
    if numbers(version)[:2] == (9, 0):
        advice = (
            "update it to 9.1 or newer, or take 8.5: hcomm 9.0 drops return codes of grouped "
            "transfers (read in hccl_group.cc:234, 274), so that a transfer that failed is "
            "reported as done; or leave --use-commfuse out; --commfuse-fb-overlap needs no such "
            "transfer"
        )
        return _finding("CANN", "warning", version, advice)
    if numbers(version) < (8, 3):
        advice = f"update it to 8.3 or newer, for torch_npu {NPU_TORCH}"
        return _finding("CANN", "warning", version, advice)
    return _finding("CANN", "ok", version)


def _cann_version(home: Path) -> str | None:
    for pattern in ("ascend_*install.info", "*/ascend_*install.info", "version.info"):
        for path in sorted(home.glob(pattern)):
            match = re.search(r"^version=(.+)$", path.read_text("utf-8", "replace"), re.M | re.I)
            if match is not None:
                return match[1].strip()
    return None


def check_stack(machine: Machine) -> Iterator[Finding]:
    """Check MindSpeed-LLM, MindSpeed and Megatron-LM, each and together."""
    names = ("mindspeed_llm", "mindspeed", "megatron")
    llm, mindspeed, megatron = (machine.find(name) for name in names)
    findings = (
        _check_llm(llm, mindspeed),
        _check_mindspeed(mindspeed, required=llm is not None),
        _check_megatron(megatron, required=llm is not None or mindspeed is not None),
    )
    yield from findings
    if all(finding.level == "ok" for finding in findings):
        yield _finding("together", "ok", f"supported: {TOGETHER}")


def _check_llm(package: Package | None, mindspeed: Package | None) -> Finding:
    if package is None:
        advice = "to train with its own pretrain_gpt.py start in its root, or put it on the path"
        level: Level = "note" if mindspeed is None else "warning"
        return _finding("MindSpeed-LLM", level, "not found", advice)
    version = package.version or "unknown"
    if package.folder_with("tasks/megatron_adaptor_v2.py") is None:
        advice = f"use {TOGETHER}: one below 2.2.0 has no feature manager to add a feature to"
        return _finding("MindSpeed-LLM", "error", version, advice)
    # 26.0.0, 26.1.0 and master all have the version 26.0.0dev0.
    if all(numbers(version)[:2] != numbers(release)[:2] for release in SUPPORTED_LLM):
        advice = (
            "compare a few iterations with and without --use-commfuse; those that were tried: "
            f"{', '.join(SUPPORTED_LLM)} and master"
        )
        return _finding("MindSpeed-LLM", "warning", version, advice)
    return _finding("MindSpeed-LLM", "ok", version)


def _check_mindspeed(package: Package | None, required: bool) -> Finding:
    if package is None and not required:
        return _finding("MindSpeed", "note", "not found", "needed on NPUs")
    text = "not found"
    if package is not None:
        text = package.version or "unknown"
        if package.folder_with("features_manager/features_manager.py") is None:
            text += ", without a feature manager"
        # Without a version number, its files decide.
        elif not package.version or numbers(text)[:2] == (0, 12):
            return _finding("MindSpeed", "ok", text)
    return _finding("MindSpeed", "error", text, f"install it from source: {TOGETHER}")


def _check_megatron(package: Package | None, required: bool) -> Finding:
    of_pypi = "pip install megatron-core==0.12.1 for the CPU"
    if package is None and not required:
        return _finding("Megatron-LM", "note", "not found", of_pypi)
    checkout = "put a checkout of Megatron-LM core_v0.12.1 first on PYTHONPATH"
    version = "not found" if package is None else package.version or "unknown"
    if package is None or numbers(version) != numbers(MEGATRON):
        why = f"; {WHY_WITHOUT}" if numbers(version) >= WITHOUT_MINDSPEED else ""
        return _finding("Megatron-LM", "error", version, f"{checkout}, or {of_pypi}{why}")
    core, training = package.folder_with("core"), package.folder_with("training")
    if training is None:
        level: Level = "error" if required else "ok"
        advice = f"{checkout}: megatron-core of PyPI has no megatron.training" * required
        return _finding("Megatron-LM", level, f"{version}, megatron.core only", advice)
    if core != training:
        text = f"megatron.core in {core}, megatron.training in {training}"
        return _finding("Megatron-LM", "warning", text, f"{checkout}, for both")
    return _finding("Megatron-LM", "ok", version)
