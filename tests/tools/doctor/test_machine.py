"""How packages are found and commands are run, on this machine."""

from __future__ import annotations

import os
import sys

import pytest

from commfuse_npu.packages import find_package
from commfuse_npu.tools.doctor import CommandResult, Package
from commfuse_npu.tools.doctor.machine import run_command
from tests.tools.doctor.machines import ROOT


def test_versions_are_read_from_files_without_importing(tmp_path, monkeypatch) -> None:
    """Packages that may not be imported, found and read as they lie there."""
    trap = "raise RuntimeError('imported')\n"
    for name, version in (("mindspeed_llm", "2.3.0"), ("mindspeed", "0.12.1")):
        home = tmp_path / f"{name}_home"
        (home / name).mkdir(parents=True)
        (home / name / "__init__.py").write_text(trap, "utf-8")
        (home / "setup.py").write_text(f"{trap}__version__ = '{version}'\n", "utf-8")
    core = tmp_path / "megatron_home" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(f"{trap}MAJOR = 0\nMINOR = 12\nPATCH = 1\n", "utf-8")
    variables = {
        "MINDSPEED_LLM_HOME": str(tmp_path / "mindspeed_llm_home"),
        "MINDSPEED_HOME": str(tmp_path / "mindspeed_home"),
    }
    for name, version in (("mindspeed_llm", "2.3.0"), ("mindspeed", "0.12.1")):
        found = find_package(name, variables)
        assert found == Package(version, (tmp_path / f"{name}_home" / name,))
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
