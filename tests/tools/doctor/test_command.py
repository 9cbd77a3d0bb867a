"""The report as a whole, and the command that prints it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from commfuse_npu.packages import Package
from commfuse_npu.tools import cli
from commfuse_npu.tools.doctor.command import diagnose
from commfuse_npu.tools.doctor.machine import CommandResult
from tests.launchers.launching import started
from tests.tools.doctor.machines import INFO_A2, NPU_ANSWERS, ROOT, machine, only, stack, summary
from tests.tools.plan.launches import CONFIG


def test_a_supported_set_on_npus_is_ready(tmp_path: Path) -> None:
    home = tmp_path / "cann" / "aarch64-linux"
    home.mkdir(parents=True)
    (home / "ascend_toolkit_install.info").write_text("package_name=a\nversion=8.3.RC1\n", "utf-8")
    variables = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                 "HCCL_CONNECT_TIMEOUT": "1200", "HCCL_DETERMINISTIC": "true",
                 "ATB_HOME_PATH": "/atb"}  # fmt: skip
    info = CommandResult(0, INFO_A2.replace("Warning", "OK     "))
    report = diagnose(machine(variables, stack(tmp_path), {**NPU_ANSWERS, "npu-smi info": info}))
    assert {finding.level for finding in report.findings} == {"ok"}
    assert summary(only(report.findings, "CANN")) == ("ok", "8.3.RC1")
    assert only(report.findings, "import torch_npu").value == "NPUs: 2"
    assert only(report.findings, "together").value.startswith("supported: MindSpeed-LLM 2.2.0")
    assert report.verdict.startswith("ready: this machine can run CommFuse on 2 NPUs (0 errors, 0")


def test_the_first_line_says_for_what_it_is_ready_or_what_is_wrong() -> None:
    packages = dict.fromkeys(("torch", "torch_npu"), Package("2.13.0"))
    verdict = diagnose(machine(packages={"torch": Package("2.13.0")})).verdict
    assert "can run the CPU form, rehearsals and simulations" in verdict
    wrong = machine({"HCCL_BUFFSIZE": "64MB"}, packages, NPU_ANSWERS)
    assert diagnose(wrong).verdict.startswith("not ready: HCCL_BUFFSIZE (1 errors, ")


def test_this_machine_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("not ready: " if code else "ready: this machine ")
    assert lines[:2] == ["", "## versions"]
    assert cli.main(["doctor", "--json"]) == code
    data = json.loads(capsys.readouterr().out)
    assert (data["ready"], data["verdict"]) == (code == 0, first)
    (version,) = [row["value"] for row in data["findings"] if row["what"] == "torch"]
    assert version.split("+")[0] == torch.__version__.split("+")[0]
    assert all(row["level"] == "ok" or row["action"] for row in data["findings"])


def test_it_imports_nothing_of_the_stack_and_runs_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from commfuse_npu.tools import cli; "
        "code = cli.main(['doctor']); assert code in (0, 1); "
        f"assert cli.main(['plan', {str(CONFIG)!r}]) == 0; "
        "print({'mindspeed', 'mindspeed_llm', 'megatron.core', 'torch_npu', "
        "'mindspeed_patches'} & set(sys.modules))"
    )
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = started(sys.executable, "-c", code, env=variables, folder=ROOT)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
