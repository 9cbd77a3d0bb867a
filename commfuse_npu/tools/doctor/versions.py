"""Checks torch, torch_npu, CANN, MindSpeed-LLM, MindSpeed and Megatron-LM, and their versions."""

from __future__ import annotations

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

__all__ = ["TRY_TORCH_NPU", "check_cann", "check_stack", "check_torch", "check_torch_npu_loads"]

_make_finding = partial(Finding, "versions")

TRY_TORCH_NPU = "import torch, torch_npu; print(); print('NPUs:', torch.npu.device_count())"
"""The program that a separate Python runs."""


def check_torch(machine: Machine) -> Iterator[Finding]:
    """Check torch, and torch_npu with it."""
    torch, npu = machine.find("torch"), machine.find("torch_npu")
    if torch is None:
        action = "install torch, with a torch_npu of the same version for NPUs"
        yield _make_finding("torch", "error", "not found", "2.1 or newer", action)
        return
    version = torch.version or "unknown"
    if (0,) < numbers(version) < (2, 1):
        yield _make_finding("torch", "error", version, "2.1 or newer", "install a newer one")
    else:
        yield _make_finding("torch", "ok", version)
    finding = partial(_make_finding, "torch_npu")
    together = f"install torch=={NPU_TORCH} and torch_npu=={NPU_TORCH}"
    if npu is None:
        level: Level = "error" if listed_npus(machine) else "note"
        yield finding(level, "not found", action=f"needed on NPUs: {together}")
        return
    bridge = npu.version or "unknown"
    if numbers(bridge)[:3] != numbers(version)[:3]:
        action = f"install torch {bridge} or torch_npu {version}"
        yield finding("error", f"{bridge} beside torch {version}", "the version of torch", action)
    elif machine.find("mindspeed_llm") is not None and numbers(version)[:3] != numbers(NPU_TORCH):
        expected = f"torch and torch_npu {NPU_TORCH}, which it is built for"
        yield finding("warning", f"{bridge} with MindSpeed-LLM", expected, together)
    else:
        yield finding("ok", bridge)


def check_torch_npu_loads(machine: Machine) -> Iterator[Finding]:
    """Check if torch_npu can be imported, and if not, whether it breaks ``import torch``."""
    automatic = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    if machine.find("torch_npu") is None:
        return
    result = machine.run("env", f"{automatic}=0", sys.executable, "-c", TRY_TORCH_NPU)
    finding = partial(_make_finding, "import torch_npu")
    if result.exit_code == 0:
        yield finding("ok", result.last_line)
        return
    failed = f"failed: {result.last_line}"
    if listed_npus(machine):
        yield finding("error", failed, "to work", "install CANN, and source its set_env.sh here")
    else:
        action = "without NPUs use an environment that torch_npu is not in"
        yield finding("warning", failed, "to work", action)
    setting = machine.variables.get(automatic, "unset")
    if setting != "0":
        expected = "0 while torch_npu cannot be imported: torch imports it by itself and fails"
        action = f"export {automatic}=0, or repair torch_npu"
        yield _make_finding(automatic, "error", setting, expected, action)


def check_cann(machine: Machine) -> Finding:
    """Check that CANN is installed, its environment is set, and it is new enough."""
    finding = partial(_make_finding, "CANN")
    home = machine.variables.get("ASCEND_HOME_PATH") or machine.variables.get("ASCEND_TOOLKIT_HOME")
    if not home and not machine.cann.exists():
        return finding("note", "not found", action="needed on NPUs")
    if not home:
        text = f"in {machine.cann}, but ASCEND_HOME_PATH is unset"
        action = f"source {machine.cann.parent / 'set_env.sh'}"
        return finding("error", text, "its environment", action)
    version = _cann_version(Path(home))
    if version is None:
        action = "check that ASCEND_HOME_PATH is the folder of the toolkit"
        text = f"no version in {home}"
        return finding("warning", text, "ascend_*install.info below it", action)
    if numbers(version)[:2] < (8, 3):
        return finding("warning", version, f"8.3 or newer, for torch_npu {NPU_TORCH}", "update it")
    if numbers(version)[:2] == (9, 0):
        return finding(
            "warning",
            version,
            "8.5, or 9.1 and newer: hcomm 9.0 drops return codes of grouped transfers (read in "
            "hccl_group.cc:234, 274), so that a transfer that failed is reported as done",
            "update it, or leave --use-commfuse out; --commfuse-fb-overlap needs no such transfer",
        )
    return finding("ok", version)


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
        yield _make_finding("together", "ok", f"supported: {TOGETHER}")


def _check_llm(package: Package | None, mindspeed: Package | None) -> Finding:
    finding = partial(_make_finding, "MindSpeed-LLM")
    if package is None:
        action = "to train with its own pretrain_gpt.py start in its root, or put it on the path"
        return finding("note" if mindspeed is None else "warning", "not found", action=action)
    version = package.version or "unknown"
    if package.folder_with("tasks/megatron_adaptor_v2.py") is None:
        expected = "2.2.0 or newer: older ones have no feature manager to add a feature to"
        return finding("error", version, expected, f"use {TOGETHER}")
    # 26.0.0, 26.1.0 and master all have the version 26.0.0dev0.
    if not any(numbers(version)[:2] == numbers(release)[:2] for release in SUPPORTED_LLM):
        expected = f"one that was tried: {', '.join(SUPPORTED_LLM)} or master"
        action = "compare a few iterations with and without --use-commfuse"
        return finding("warning", version, expected, action)
    return finding("ok", version)


def _check_mindspeed(package: Package | None, required: bool) -> Finding:
    finding = partial(_make_finding, "MindSpeed")
    if package is None and not required:
        return finding("note", "not found", action="needed on NPUs")
    text = "not found"
    if package is not None:
        text = package.version or "unknown"
        # Without a version number, its files decide.
        known = not package.version or numbers(text)[:2] == (0, 12)
        has_features = package.folder_with("features_manager/features_manager.py") is not None
        if known and has_features:
            return finding("ok", text)
        text += ", without a feature manager" * (not has_features)
    branch = "0.12.1: branch <version of MindSpeed-LLM>_core_r0.12.1, or master"
    return finding("error", text, branch, f"install it from source: {TOGETHER}")


def _check_megatron(package: Package | None, required: bool) -> Finding:
    finding = partial(_make_finding, "Megatron-LM")
    if package is None and not required:
        return finding("note", "not found", action="pip install megatron-core==0.12.1 for the CPU")
    checkout = "put a checkout of Megatron-LM core_v0.12.1 first on PYTHONPATH"
    version = "not found" if package is None else package.version or "unknown"
    if package is None or numbers(version) != numbers(MEGATRON):
        why = f": {WHY_WITHOUT}" if numbers(version) >= WITHOUT_MINDSPEED else ""
        action = f"{checkout}, or pip install megatron-core==0.12.1 for the CPU"
        return finding("error", version, f"{MEGATRON} (core_v0.12.1){why}", action)
    core, training = package.folder_with("core"), package.folder_with("training")
    text = version if training else f"{version}, megatron.core only"
    if training is None and required:
        expected = "megatron.training too, which megatron-core of PyPI has not"
        return finding("error", text, expected, checkout)
    if training is not None and core != training:
        text = f"megatron.core in {core}, megatron.training in {training}"
        return finding("warning", text, "both from one checkout", checkout)
    return finding("ok", text)
