"""MindSpeed-LLM, MindSpeed and Megatron-LM: are they there, and of versions that fit?"""

from __future__ import annotations

from commfuse_npu.tools.doctor.finding import Finding, Level, about
from commfuse_npu.tools.doctor.machine import Machine, Package
from commfuse_npu.tools.doctor.versions import MEGATRON, SUPPORTED_LLM, TOGETHER, numbers

__all__ = ["check_stack"]

_about = about("versions")


def check_stack(machine: Machine) -> list[Finding]:
    """MindSpeed-LLM, MindSpeed and Megatron-LM, alone and together."""
    llm, mindspeed, megatron = (
        machine.find(name) for name in ("mindspeed_llm", "mindspeed", "megatron")
    )
    required = llm is not None
    found = [
        *_check_llm(llm, mindspeed),
        *_check_mindspeed(mindspeed, required),
        *_check_megatron(megatron, required or mindspeed is not None),
    ]
    if found and all(finding.level == "ok" for finding in found):
        found.append(_about("together", "ok", f"supported: {TOGETHER}"))
    return found


def _check_llm(package: Package | None, mindspeed: Package | None) -> list[Finding]:
    if package is None:
        what_for = "to train with its own pretrain_gpt.py start in its root, or put it on the path"
        level: Level = "note" if mindspeed is None else "warning"
        return [_about("MindSpeed-LLM", level, "not found", action=what_for)]
    version = package.version or "unknown"
    if package.folder_with("tasks/megatron_adaptor_v2.py") is None:
        return [
            _about(
                "MindSpeed-LLM",
                "error",
                version,
                "2.2.0 or newer: 2.1.0 and older pin Megatron core_r0.8.0 and have no feature "
                "manager, so that no feature can be added",
                f"use {TOGETHER}",
            )
        ]
    # 26.0.0dev0 is what 26.0.0, 26.1.0 and master all call themselves.
    tried = any(numbers(version)[:2] == numbers(known)[:2] for known in SUPPORTED_LLM)
    if not tried:
        return [
            _about(
                "MindSpeed-LLM",
                "warning",
                version,
                f"one that was tried: {', '.join(SUPPORTED_LLM)} or master",
                "compare a few iterations with and without --use-commfuse",
            )
        ]
    return [_about("MindSpeed-LLM", "ok", version)]


def _check_mindspeed(package: Package | None, required: bool) -> list[Finding]:
    if package is None:
        return [
            _about(
                "MindSpeed",
                "error" if required else "note",
                "not found",
                "its branch <version of MindSpeed-LLM>_core_r0.12.1, or master" if required else "",
                "install MindSpeed from source" if required else "needed on NPUs",
            )
        ]
    version = package.version or "unknown"
    has_features = package.folder_with("features_manager/features_manager.py") is not None
    # Without a version, its files decide.
    if not has_features or (package.version and numbers(version)[:2] != (0, 12)):
        return [
            _about(
                "MindSpeed",
                "error",
                version if has_features else f"{version}, without a feature manager",
                "0.12.1: branch <version of MindSpeed-LLM>_core_r0.12.1, or master",
                f"use {TOGETHER}",
            )
        ]
    return [_about("MindSpeed", "ok", version)]


def _check_megatron(package: Package | None, required: bool) -> list[Finding]:
    what = "Megatron-LM"
    if package is None:
        return [
            _about(
                what,
                "error" if required else "note",
                "not found",
                "core_v0.12.1" if required else "",
                "put Megatron-LM core_v0.12.1 on PYTHONPATH, or its folder megatron into the root "
                "of MindSpeed-LLM"
                if required
                else "pip install megatron-core==0.12.1 to train on CPU",
            )
        ]
    version = package.version or "unknown"
    if numbers(version) != numbers(MEGATRON):
        return [
            _about(
                what,
                "error",
                version,
                f"{MEGATRON} (core_v0.12.1)",
                "check the tag core_v0.12.1 out, or pip install megatron-core==0.12.1 for the CPU",
            )
        ]
    core, training = package.folder_with("core"), package.folder_with("training")
    if training is None:
        return [
            _about(
                what,
                "error" if required else "ok",
                f"{version}, megatron.core only",
                "megatron.training too" if required else "",
                "put a checkout of Megatron-LM core_v0.12.1 on PYTHONPATH: the package on PyPI has "
                "no megatron.training"
                if required
                else "",
            )
        ]
    if core != training:
        return [
            _about(
                what,
                "warning",
                f"megatron.core in {core}, megatron.training in {training}",
                "both from one checkout",
                "uninstall megatron-core, or put the checkout first on PYTHONPATH",
            )
        ]
    return [_about(what, "ok", version)]
