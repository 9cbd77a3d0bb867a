"""torch, torch_npu, CANN and the stack of MindSpeed on made-up machines, and how they are found."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from commfuse_npu.packages import find_package
from commfuse_npu.tools.doctor import CommandResult, Machine, Package
from commfuse_npu.tools.doctor.machine import run_command
from commfuse_npu.tools.doctor.versions import (
    TRY_TORCH_NPU,
    check_cann,
    check_stack,
    check_torch,
    check_torch_npu_loads,
)
from tests.tools.doctor.machines import NPU_ANSWERS, ROOT, machine, only, stack, summary


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
    made = {name: Package(version) for name, version in packages.items()}
    assert summary(only(check_torch(machine(packages=made)), what)) == (level, value)


@pytest.mark.parametrize(
    ("code", "output", "said"),
    [
        (1, "Traceback\nImportError: libhccl.so: cannot\n", "ImportError: libhccl.so: cannot"),
        (-6, "", "no output"),
    ],
)
def test_a_torch_npu_that_does_not_load(code: int, output: str, said: str) -> None:
    """It is tried without torch loading it first, and torch would fail to."""
    tried = []
    automatic = "TORCH_DEVICE_BACKEND_AUTOLOAD"

    def found(variables: Mapping[str, str], info: CommandResult | None = None) -> dict[str, str]:
        def run(command: Sequence[str], given: Mapping[str, str]) -> CommandResult | None:
            if command[0] == "npu-smi":
                return info
            tried.append((*command, given[automatic], given["A"]))
            return CommandResult(code, output)

        here = Machine({"A": "b", **variables}, {"torch_npu": Package("2.7.1")}.get, run)
        findings = list(check_torch_npu_loads(here))
        assert findings[0].value == f"failed: {said}"
        return {one.what: one.level for one in findings}

    assert found({}) == {"import torch_npu": "warning", automatic: "error"}
    assert found({automatic: "0"}) == {"import torch_npu": "warning"}
    assert found({automatic: "0"}, NPU_ANSWERS["npu-smi info"]) == {"import torch_npu": "error"}
    assert set(tried) == {(sys.executable, "-c", TRY_TORCH_NPU, "0", "b")}


def test_cann(tmp_path: Path) -> None:
    assert summary(check_cann(machine())) == ("note", "not found")
    found = check_cann(machine(cann=tmp_path))
    assert (found.level, found.action) == ("error", f"source {tmp_path.parent / 'set_env.sh'}")
    home = machine({"ASCEND_TOOLKIT_HOME": str(tmp_path)})
    assert summary(check_cann(home)) == ("warning", f"no version in {tmp_path}")
    for version, level in (("8.1.RC1", "warning"), ("9.0.0", "warning"), ("9.1.0", "ok")):
        (tmp_path / "version.info").write_text(f"Version={version}\n", "utf-8")
        assert summary(check_cann(home)) == (level, version)


# ------------------------------------------------------------------ MindSpeed's stack


def test_tried_versions_are_supported_and_others_are_not(tmp_path: Path) -> None:
    packages = stack(tmp_path)
    assert [finding.level for finding in check_stack(machine())] == ["note"] * 3, "fine on a CPU"
    for version in ("2.2.0", "2.3.0", "26.0.0dev0", "26.0.0", "26.1.0"):
        packages["mindspeed_llm"] = dataclasses.replace(packages["mindspeed_llm"], version=version)
        found = check_stack(machine(packages=packages))
        assert {finding.level for finding in found} == {"ok"}
    for name, what, level in (
        ("mindspeed", "MindSpeed", "error"),
        ("megatron", "Megatron-LM", "error"),
        ("mindspeed_llm", "MindSpeed-LLM", "warning"),
    ):
        others = {other: package for other, package in packages.items() if other != name}
        findings = list(check_stack(machine(packages=others)))
        assert summary(only(findings, what)) == (level, "not found")
        assert not [one for one in findings if one.what == "together"]


def test_versions_that_nobody_supports(tmp_path: Path) -> None:
    packages = stack(tmp_path, llm="27.0.0", mindspeed="0.8.0")
    found = list(check_stack(machine(packages=packages)))
    assert summary(only(found, "MindSpeed-LLM")) == ("warning", "27.0.0")
    assert summary(only(found, "MindSpeed")) == ("error", "0.8.0")
    (tmp_path / "mindspeed_llm/tasks/megatron_adaptor_v2.py").unlink()
    (tmp_path / "mindspeed/features_manager/features_manager.py").unlink()
    found = list(check_stack(machine(packages=packages)))
    assert only(found, "MindSpeed").value == "0.8.0, without a feature manager"
    assert only(found, "MindSpeed-LLM").level == "error"


def test_megatrons_that_do_not_go_together(tmp_path: Path) -> None:
    packages = stack(tmp_path)
    wheel = tmp_path / "wheel"
    (wheel / "core").mkdir(parents=True)
    of_pypi, mixed = Package("0.12.1", (wheel,)), Package("0.12.1", (wheel, tmp_path / "megatron"))

    def megatron(package: Package, *beside: str) -> tuple[str, str]:
        others = {name: packages[name] for name in beside}
        found = check_stack(machine(packages={"megatron": package, **others}))
        return summary(only(found, "Megatron-LM"))

    both = "mindspeed_llm", "mindspeed"
    for version in ("0.8.0", "0.17.0"):
        other = dataclasses.replace(packages["megatron"], version=version)
        assert megatron(other) == ("error", version)
    assert megatron(of_pypi, *both) == ("error", "0.12.1, megatron.core only")
    assert megatron(of_pypi) == ("ok", "0.12.1, megatron.core only")
    level, value = megatron(mixed, *both)
    assert level == "warning"
    assert f"megatron.core in {wheel}, megatron.training in {tmp_path / 'megatron'}" in value


# ------------------------------------------------------------------ how they are found


def test_versions_are_read_from_files_without_importing(tmp_path, monkeypatch) -> None:
    """Packages that may not be imported, found and read as they lie there."""
    trap = "raise RuntimeError('imported')\n"
    variables = {}
    for name, version in (("mindspeed_llm", "2.3.0"), ("mindspeed", "0.12.1")):
        home = tmp_path / f"{name}_home"
        (home / name).mkdir(parents=True)
        (home / name / "__init__.py").write_text(trap, "utf-8")
        (home / "setup.py").write_text(f"{trap}__version__ = '{version}'\n", "utf-8")
        variables[f"{name.upper()}_HOME"] = str(home)
        assert find_package(name, variables) == Package(version, (home / name,))
    core = tmp_path / "megatron_home" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(f"{trap}MAJOR = 0\nMINOR = 12\nPATCH = 1\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "megatron_home"))
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    megatron = find_package("megatron", {})
    assert megatron is not None
    assert (megatron.version, megatron.folders[0]) == ("0.12.1", core.parent)
    assert find_package("no_such_package", variables) is None
    installed = find_package("pytest", {})
    assert installed is not None
    assert installed.version == pytest.__version__


def test_commands_that_fail_or_are_missing() -> None:
    environment = dict(os.environ)
    assert run_command(["no-such-command-anywhere"], environment) is None
    failed = run_command([sys.executable, "-c", "import sys; sys.exit('why')"], environment)
    assert failed == CommandResult(1, "why\n")
    refused = run_command([str(ROOT)], environment)
    assert refused is not None
    assert refused.exit_code == 126
