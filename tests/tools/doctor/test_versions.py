"""torch, torch_npu, CANN and the stack of MindSpeed on made-up machines, and how they are found."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from commfuse_npu.packages import Package, find_package
from commfuse_npu.tools.doctor.machine import CommandResult
from commfuse_npu.tools.doctor.versions import (
    TRY_TORCH_NPU,
    check_cann,
    check_stack,
    check_torch,
    check_torch_npu_loads,
)
from tests.tools.doctor.machines import NPU_ANSWERS, machine, only, stack, summary

AUTOMATIC = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@pytest.mark.parametrize(
    ("packages", "what", "level", "value"),
    [
        ({}, "torch", "error", "not found"),
        ({"torch": "2.0.1"}, "torch", "error", "2.0.1"),
        ({"torch": "2.7.1+cpu"}, "torch_npu", "note", "not found"),
        ({"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post2"}, "torch_npu", "ok", "2.7.1.post2"),
        ({"torch": "2.7.1", "torch_npu": "2.6.0"}, "torch_npu", "error", "2.6.0 beside torch "
         "2.7.1"),
        ({"torch": "2.9.0", "torch_npu": "2.9.0"}, "torch_npu", "ok", "2.9.0"),
        ({"torch": "2.9.0", "torch_npu": "2.9.0", "mindspeed_llm": "2.3.0"}, "torch_npu",
         "warning", "2.9.0 with MindSpeed-LLM"),
    ],
)  # fmt: skip
def test_torch_and_its_bridge(packages, what, level, value) -> None:
    installed = {name: Package(version) for name, version in packages.items()}
    assert summary(only(check_torch(machine(packages=installed)), what)) == (level, value)
    if (what, value) == ("torch_npu", "not found"):
        here = check_torch(machine(packages=installed, answers=NPU_ANSWERS))
        assert only(here, what).level == "error"


@pytest.mark.parametrize(
    ("variables", "npus", "levels"),
    [
        ({}, False, {"import torch_npu": "warning", AUTOMATIC: "error"}),
        ({AUTOMATIC: "0"}, False, {"import torch_npu": "warning"}),
        ({AUTOMATIC: "0"}, True, {"import torch_npu": "error"}),
    ],
)
def test_a_torch_npu_that_does_not_load(variables, npus: bool, levels: dict[str, str]) -> None:
    """The check imports it with torch's automatic loading off, which would fail as well."""

    tried = f"env {AUTOMATIC}=0 {sys.executable} -c {TRY_TORCH_NPU}"
    answers = {tried: CommandResult(1, "Traceback\nImportError: libhccl.so: cannot\n")}
    if npus:
        answers["npu-smi info"] = NPU_ANSWERS["npu-smi info"]
    host = machine(variables, {"torch_npu": Package("2.7.1")}, answers)
    findings = list(check_torch_npu_loads(host))
    assert findings[0].value == "failed: ImportError: libhccl.so: cannot"
    assert {finding.what: finding.level for finding in findings} == levels


def test_cann(tmp_path: Path) -> None:
    assert summary(check_cann(machine())) == ("note", "not found")
    finding = check_cann(machine(cann=tmp_path))
    assert (finding.level, finding.action) == ("error", f"source {tmp_path.parent / 'set_env.sh'}")
    home = machine({"ASCEND_TOOLKIT_HOME": str(tmp_path)})
    assert summary(check_cann(home)) == ("warning", f"no version in {tmp_path}")
    for version, level in (("8.1.RC1", "warning"), ("9.0.0", "warning"), ("9.1.0", "ok")):
        (tmp_path / "version.info").write_text(f"Version={version}\n", "utf-8")
        assert summary(check_cann(home)) == (level, version)


# ------------------------------------------------------------------ MindSpeed's stack


def test_the_stack(tmp_path: Path) -> None:
    packages = stack(tmp_path)
    wheel = tmp_path / "wheel"
    (wheel / "core").mkdir(parents=True)
    checkout = tmp_path / "megatron"

    def found(**changed: Package | str | None) -> dict[str, tuple[str, str]]:
        """Findings by subject, with packages of other versions, replaced or missing."""
        installed = {
            name: dataclasses.replace(packages[name], version=new) if isinstance(new, str) else new
            for name, new in {**packages, **changed}.items()
            if new is not None
        }
        return {row.what: summary(row) for row in check_stack(machine(packages=installed))}

    assert [finding.level for finding in check_stack(machine())] == ["note"] * 3, "fine on a CPU"
    for version in ("2.2.0", "2.3.0", "26.0.0dev0", "26.0.0", "26.1.0"):
        assert found(mindspeed_llm=version)["together"][0] == "ok"
    absent = {"mindspeed_llm": None, "mindspeed": None}
    of_pypi = Package("0.12.1", (wheel,))
    for changed, subject, expected in (
        ({"mindspeed": None}, "MindSpeed", ("error", "not found")),
        ({"megatron": None}, "Megatron-LM", ("error", "not found")),
        ({"mindspeed_llm": None}, "MindSpeed-LLM", ("warning", "not found")),
        ({"mindspeed_llm": "27.0.0"}, "MindSpeed-LLM", ("warning", "27.0.0")),
        ({"mindspeed": "0.8.0"}, "MindSpeed", ("error", "0.8.0")),
        ({"megatron": "0.8.0"}, "Megatron-LM", ("error", "0.8.0")),
        ({"megatron": "0.17.0"}, "Megatron-LM", ("error", "0.17.0")),
        ({"megatron": of_pypi}, "Megatron-LM", ("error", "0.12.1, megatron.core only")),
        ({"megatron": of_pypi, **absent}, "Megatron-LM", ("ok", "0.12.1, megatron.core only")),
        ({"megatron": Package("0.12.1", (wheel, checkout))}, "Megatron-LM",
         ("warning", f"megatron.core in {wheel}, megatron.training in {checkout}")),
    ):  # fmt: skip
        findings = found(**changed)
        assert findings[subject] == expected
        assert "together" not in findings
    (tmp_path / "mindspeed_llm/tasks/megatron_adaptor_v2.py").unlink()
    (tmp_path / "mindspeed/features_manager/features_manager.py").unlink()
    findings = found()
    assert findings["MindSpeed"] == ("error", "0.12.1, without a feature manager")
    assert findings["MindSpeed-LLM"][0] == "error"


# ------------------------------------------------------------------ how they are found


def test_versions_are_read_from_files_without_importing(tmp_path, monkeypatch) -> None:
    """Packages whose import would fail are found and their files are read."""
    trap = "raise RuntimeError('imported')\n"
    home, core = tmp_path / "home", tmp_path / "megatron_home" / "megatron" / "core"
    (home / "mindspeed").mkdir(parents=True)
    (home / "mindspeed" / "__init__.py").write_text(trap, "utf-8")
    (home / "setup.py").write_text(f"{trap}__version__ = '0.12.1'\n", "utf-8")
    package = find_package("mindspeed", {"MINDSPEED_HOME": str(home)})
    assert package == Package("0.12.1", (home / "mindspeed",))
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(f"{trap}MAJOR = 0\nMINOR = 12\nPATCH = 1\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "megatron_home"))
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    megatron = find_package("megatron", {})
    assert megatron is not None
    assert (megatron.version, megatron.folders[0]) == ("0.12.1", core.parent)
    assert find_package("no_such_package", {}) is None
