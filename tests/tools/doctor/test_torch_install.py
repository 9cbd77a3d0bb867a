"""torch, torch_npu and CANN on made-up machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import pytest

from commfuse_npu.tools.doctor import CommandResult, Machine, Package
from commfuse_npu.tools.doctor.torch_install import (
    TRY_TORCH_NPU,
    check_cann,
    check_torch,
    check_torch_npu_loads,
)
from tests.tools.doctor.machines import NPU_ANSWERS, machine, only, summary


@pytest.mark.parametrize(
    ("packages", "what", "level", "value"),
    [
        ({}, "torch", "error", "not found"),
        ({"torch": "2.0.1"}, "torch", "error", "2.0.1"),
        ({"torch": "2.7.1+cpu"}, "torch_npu", "note", "not found"),
        ({"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post2"}, "torch_npu", "ok", "2.7.1.post2"),
        (
            {"torch": "2.7.1", "torch_npu": "2.6.0"},
            "torch_npu",
            "error",
            "2.6.0 beside torch 2.7.1",
        ),
        ({"torch": "2.9.0", "torch_npu": "2.9.0"}, "torch_npu", "ok", "2.9.0"),
        (
            {"torch": "2.9.0", "torch_npu": "2.9.0", "mindspeed_llm": "2.3.0"},
            "torch_npu",
            "warning",
            "2.9.0 with MindSpeed-LLM",
        ),
    ],
)
def test_torch_and_its_bridge(packages, what, level, value) -> None:
    made = {name: Package(version) for name, version in packages.items()}
    assert summary(only(check_torch(machine(packages=made)), what)) == (level, value)


FAILED = CommandResult(1, "Traceback\nImportError: libhccl.so: cannot open shared object file\n")
ABORTED = CommandResult(-6, "")
HANGS = CommandResult(None, "no answer within 60 s")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (FAILED, "failed: ImportError: libhccl.so: cannot open shared object file"),
        (ABORTED, "failed: no output"),
        (HANGS, "failed: no answer within 60 s"),
    ],
)
def test_a_torch_npu_that_does_not_load(result: CommandResult, said: str) -> None:
    packages = {"torch_npu": Package("2.7.1")}
    answers = {TRY_TORCH_NPU: result}
    found = list(check_torch_npu_loads(machine({}, packages, answers)))
    assert summary(only(found, "import torch_npu")) == ("warning", said)
    automatic = only(found, "TORCH_DEVICE_BACKEND_AUTOLOAD")
    assert summary(automatic) == ("error", "unset")
    assert automatic.action.startswith("export TORCH_DEVICE_BACKEND_AUTOLOAD=0")

    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    (found_off,) = check_torch_npu_loads(machine(off, packages, answers))
    assert found_off.level == "warning"

    with_npus = {**answers, "npu-smi info": NPU_ANSWERS["npu-smi info"]}
    (on_npus,) = check_torch_npu_loads(machine(off, packages, with_npus))
    assert on_npus.level == "error"
    assert "set_env.sh" in on_npus.action


def test_torch_npu_is_tried_without_torch_loading_it_first() -> None:
    seen = []

    def run(command: Sequence[str], variables: Mapping[str, str]) -> CommandResult:
        seen.append((tuple(command), variables["TORCH_DEVICE_BACKEND_AUTOLOAD"], variables["A"]))
        return CommandResult(0, "NPUs: 0")

    packages = {"torch_npu": Package("2.7.1")}
    list(check_torch_npu_loads(Machine({"A": "b"}, packages.get, run)))
    assert seen == [((sys.executable, "-c", TRY_TORCH_NPU), "0", "b")]


def test_cann(tmp_path) -> None:
    assert summary(check_cann(machine())) == ("note", "not found")
    found = check_cann(machine(cann=tmp_path))
    assert (found.level, found.action) == ("error", f"source {tmp_path.parent / 'set_env.sh'}")
    home = {"ASCEND_TOOLKIT_HOME": str(tmp_path)}
    found = check_cann(machine(home))
    assert summary(found) == ("warning", f"no version in {tmp_path}")
    (tmp_path / "version.info").write_text("Version=8.1.RC1\n", "utf-8")
    found = check_cann(machine(home))
    assert summary(found) == ("warning", "8.1.RC1")
    (tmp_path / "version.info").write_text("Version=9.1.0\n", "utf-8")
    assert summary(check_cann(machine(home))) == ("ok", "9.1.0")
