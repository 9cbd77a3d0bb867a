"""MindSpeed-LLM, MindSpeed and Megatron-LM: are they there, and of versions that fit?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from commfuse_npu.packages import (
    MEGATRON,
    SUPPORTED_LLM,
    TOGETHER,
    WHY_WITHOUT,
    WITHOUT_MINDSPEED,
    Package,
    numbers,
)
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.machine import Machine

__all__ = ["check_stack"]

_about = partial(Finding, "versions")


def check_stack(machine: Machine) -> Iterator[Finding]:
    """MindSpeed-LLM, MindSpeed and Megatron-LM, alone and together."""
    llm, mindspeed, megatron = (
        machine.find(name) for name in ("mindspeed_llm", "mindspeed", "megatron")
    )
    found = (
        _check_llm(llm, mindspeed),
        _check_mindspeed(mindspeed, required=llm is not None),
        _check_megatron(megatron, required=llm is not None or mindspeed is not None),
    )
    yield from found
    if all(finding.level == "ok" for finding in found):
        yield _about("together", "ok", f"supported: {TOGETHER}")


def _check_llm(package: Package | None, mindspeed: Package | None) -> Finding:
    about = partial(_about, "MindSpeed-LLM")
    if package is None:
        what_for = "to train with its own pretrain_gpt.py start in its root, or put it on the path"
        return about("note" if mindspeed is None else "warning", "not found", action=what_for)
    version = package.version or "unknown"
    if package.folder_with("tasks/megatron_adaptor_v2.py") is None:
        return about(
            "error",
            version,
            "2.2.0 or newer: 2.1.0 and older pin Megatron core_r0.8.0 and have no feature "
            "manager, so that no feature can be added",
            f"use {TOGETHER}",
        )
    # 26.0.0dev0 is what 26.0.0, 26.1.0 and master all call themselves.
    if not any(numbers(version)[:2] == numbers(known)[:2] for known in SUPPORTED_LLM):
        return about(
            "warning",
            version,
            f"one that was tried: {', '.join(SUPPORTED_LLM)} or master",
            "compare a few iterations with and without --use-commfuse",
        )
    return about("ok", version)


def _check_mindspeed(package: Package | None, required: bool) -> Finding:
    about = partial(_about, "MindSpeed")
    branch = "branch <version of MindSpeed-LLM>_core_r0.12.1, or master"
    if package is None:
        if not required:
            return about("note", "not found", action="needed on NPUs")
        return about("error", "not found", f"its {branch}", "install MindSpeed from source")
    version = package.version or "unknown"
    has_features = package.folder_with("features_manager/features_manager.py") is not None
    # Without a version, its files decide.
    if not has_features or (package.version and numbers(version)[:2] != (0, 12)):
        said = version if has_features else f"{version}, without a feature manager"
        return about("error", said, f"0.12.1: {branch}", f"use {TOGETHER}")
    return about("ok", version)


def _check_megatron(package: Package | None, required: bool) -> Finding:
    about = partial(_about, "Megatron-LM")
    if package is None:
        if not required:
            advice = "pip install megatron-core==0.12.1 to train on CPU"
            return about("note", "not found", action=advice)
        return about(
            "error",
            "not found",
            "core_v0.12.1",
            "put Megatron-LM core_v0.12.1 on PYTHONPATH, or its folder megatron into the root of "
            "MindSpeed-LLM",
        )
    version = package.version or "unknown"
    if numbers(version) != numbers(MEGATRON):
        why = f": {WHY_WITHOUT}" if numbers(version) >= WITHOUT_MINDSPEED else ""
        return about(
            "error",
            version,
            f"{MEGATRON} (core_v0.12.1){why}",
            "check the tag core_v0.12.1 out, or pip install megatron-core==0.12.1 for the CPU",
        )
    core, training = package.folder_with("core"), package.folder_with("training")
    if training is None:
        said = f"{version}, megatron.core only"
        if not required:
            return about("ok", said)
        return about(
            "error",
            said,
            "megatron.training too",
            "put a checkout of Megatron-LM core_v0.12.1 on PYTHONPATH: the package on PyPI has no "
            "megatron.training",
        )
    if core != training:
        return about(
            "warning",
            f"megatron.core in {core}, megatron.training in {training}",
            "both from one checkout",
            "uninstall megatron-core, or put the checkout first on PYTHONPATH",
        )
    return about("ok", version)
