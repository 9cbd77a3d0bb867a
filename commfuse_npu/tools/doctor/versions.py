"""Checks torch, torch_npu, CANN, MindSpeed-LLM, MindSpeed and Megatron-LM, and their versions."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
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

TRY_TORCH_NPU = "import torch, torch_npu; print(); print('NPUs:', torch.npu.device_count())"
"""The program that a separate Python runs."""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def _judged(
    what: str, value: str, good: bool, expected: str = "", action: str = "", bad: Level = "error"
) -> Finding:
    """What was found of a package: ``ok``, or ``bad`` with advice."""
    if good:
        return Finding("versions", what, "ok", value)
    return Finding("versions", what, bad, value, expected, action)


def check_torch(machine: Machine) -> Iterator[Finding]:
    """Check torch, and torch_npu with it."""
    torch, npu = machine.find("torch"), machine.find("torch_npu")
    if torch is None:
        action = "install torch, with a torch_npu of the same version for NPUs"
        yield _judged("torch", "not found", False, "2.1 or newer", action)
        return
    version = torch.version or "unknown"
    new = not (0,) < numbers(version) < (2, 1)
    yield _judged("torch", version, new, "2.1 or newer", "install a newer one")
    together = f"install torch=={NPU_TORCH} and torch_npu=={NPU_TORCH}"
    if npu is None:
        level: Level = "error" if listed_npus(machine) else "note"
        yield _judged("torch_npu", "not found", False, "", f"needed on NPUs: {together}", level)
        return
    bridge = npu.version or "unknown"
    if numbers(bridge)[:3] != numbers(version)[:3]:
        action = f"install torch {bridge} or torch_npu {version}"
        beside = f"{bridge} beside torch {version}"
        yield _judged("torch_npu", beside, False, "the version of torch", action)
    elif machine.find("mindspeed_llm") is not None and numbers(version)[:3] != numbers(NPU_TORCH):
        expected = f"torch and torch_npu {NPU_TORCH}, which it is built for"
        beside = f"{bridge} with MindSpeed-LLM"
        yield _judged("torch_npu", beside, False, expected, together, "warning")
    else:
        yield _judged("torch_npu", bridge, True)


def check_torch_npu_loads(machine: Machine) -> Iterator[Finding]:
    """Check if torch_npu can be imported, and if not, whether it breaks ``import torch``."""
    if machine.find("torch_npu") is None:
        return
    result = machine.run("env", f"{_AUTOLOAD}=0", sys.executable, "-c", TRY_TORCH_NPU)
    if result.exit_code == 0:
        yield _judged("import torch_npu", result.last_line, True)
        return
    level: Level = "warning"
    action = "without NPUs use an environment that torch_npu is not in"
    if listed_npus(machine):
        level, action = "error", "install CANN, and source its set_env.sh here"
    failed = f"failed: {result.last_line}"
    yield _judged("import torch_npu", failed, False, "to work", action, level)
    setting = machine.variables.get(_AUTOLOAD, "unset")
    if setting != "0":
        expected = "0 while torch_npu cannot be imported: torch imports it by itself and fails"
        action = f"export {_AUTOLOAD}=0, or repair torch_npu"
        yield _judged(_AUTOLOAD, setting, False, expected, action)


def check_cann(machine: Machine) -> Finding:
    """Check that CANN is installed, its environment is set, and it is new enough."""
    home = machine.variables.get("ASCEND_HOME_PATH") or machine.variables.get("ASCEND_TOOLKIT_HOME")
    if not home and not machine.cann.exists():
        return _judged("CANN", "not found", False, "", "needed on NPUs", "note")
    if not home:
        text = f"in {machine.cann}, but ASCEND_HOME_PATH is unset"
        action = f"source {machine.cann.parent / 'set_env.sh'}"
        return _judged("CANN", text, False, "its environment", action)
    version = _cann_version(Path(home))
    known, action = version or f"no version in {home}", "update it"
    expected = f"8.3 or newer, for torch_npu {NPU_TORCH}"
    if version is None:
        expected = "ascend_*install.info below it"
        action = "check that ASCEND_HOME_PATH is the folder of the toolkit"
    elif numbers(version)[:2] == (9, 0):
        expected = (
            "8.5, or 9.1 and newer: hcomm 9.0 drops return codes of grouped transfers (read in "
            "hccl_group.cc:234, 274), so that a transfer that failed is reported as done"
        )
        action += ", or leave --use-commfuse out; --commfuse-fb-overlap needs no such transfer"
    good = version is not None and (9, 0) != numbers(version)[:2] >= (8, 3)
    return _judged("CANN", known, good, expected, action, "warning")


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
        yield _judged("together", f"supported: {TOGETHER}", True)


def _check_llm(package: Package | None, mindspeed: Package | None) -> Finding:
    if package is None:
        action = "to train with its own pretrain_gpt.py start in its root, or put it on the path"
        level: Level = "note" if mindspeed is None else "warning"
        return _judged("MindSpeed-LLM", "not found", False, "", action, level)
    version = package.version or "unknown"
    if package.folder_with("tasks/megatron_adaptor_v2.py") is None:
        expected = "2.2.0 or newer: older ones have no feature manager to add a feature to"
        return _judged("MindSpeed-LLM", version, False, expected, f"use {TOGETHER}")
    # 26.0.0, 26.1.0 and master all have the version 26.0.0dev0.
    tried = any(numbers(version)[:2] == numbers(release)[:2] for release in SUPPORTED_LLM)
    expected = f"one that was tried: {', '.join(SUPPORTED_LLM)} or master"
    action = "compare a few iterations with and without --use-commfuse"
    return _judged("MindSpeed-LLM", version, tried, expected, action, "warning")


def _check_mindspeed(package: Package | None, required: bool) -> Finding:
    text, good = "not found", False
    if package is None and not required:
        return _judged("MindSpeed", text, False, "", "needed on NPUs", "note")
    if package is not None:
        text = package.version or "unknown"
        has_features = package.folder_with("features_manager/features_manager.py") is not None
        # Without a version number, its files decide.
        good = has_features and (not package.version or numbers(text)[:2] == (0, 12))
        text += ", without a feature manager" * (not has_features)
    branch = "0.12.1: branch <version of MindSpeed-LLM>_core_r0.12.1, or master"
    return _judged("MindSpeed", text, good, branch, f"install it from source: {TOGETHER}")


def _check_megatron(package: Package | None, required: bool) -> Finding:
    of_pypi = "pip install megatron-core==0.12.1 for the CPU"
    if package is None and not required:
        return _judged("Megatron-LM", "not found", False, "", of_pypi, "note")
    checkout = "put a checkout of Megatron-LM core_v0.12.1 first on PYTHONPATH"
    version = "not found" if package is None else package.version or "unknown"
    if package is None or numbers(version) != numbers(MEGATRON):
        why = f": {WHY_WITHOUT}" if numbers(version) >= WITHOUT_MINDSPEED else ""
        expected = f"{MEGATRON} (core_v0.12.1){why}"
        return _judged("Megatron-LM", version, False, expected, f"{checkout}, or {of_pypi}")
    core, training = package.folder_with("core"), package.folder_with("training")
    if training is None:
        expected = "megatron.training too, which megatron-core of PyPI has not"
        text = f"{version}, megatron.core only"
        return _judged("Megatron-LM", text, not required, expected, checkout)
    same = core == training
    text = version if same else f"megatron.core in {core}, megatron.training in {training}"
    return _judged("Megatron-LM", text, same, "both from one checkout", checkout, "warning")
