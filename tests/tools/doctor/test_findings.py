"""What is found on made-up machines: versions, NPUs and their links, environment variables."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from commfuse_npu.launch.packages import Package, find_package
from commfuse_npu.tools import cli
from commfuse_npu.tools.doctor.doctor_command import diagnose
from commfuse_npu.tools.doctor.local_machine import ABSENT, CommandResult, LocalMachine, run_command
from commfuse_npu.tools.doctor.versions import TRY_TORCH_NPU
from tests.tools.doctor.machines import (
    INFO_A2,
    INFO_A3,
    NPU_ANSWERS,
    found,
    machine,
    stack,
    topology,
)

AUTOMATIC = "TORCH_DEVICE_BACKEND_AUTOLOAD"
BROKEN = CommandResult(1, "Traceback\nImportError: libhccl.so: cannot\n")
# The check imports it with torch's automatic loading off, which would fail as well.
TRIED = {f"env {AUTOMATIC}=0 {sys.executable} -c {TRY_TORCH_NPU}": BROKEN}
INFO = "npu-smi info"


def with_packages(words: str, **variables: str) -> LocalMachine:
    """A machine with packages of these versions: ``torch 2.7.1 torch_npu 2.7.1``."""
    versions = words.split()
    packages = dict(zip(versions[::2], map(Package, versions[1::2]), strict=True))
    return machine(variables, packages, TRIED)


def with_npus(
    info: CommandResult = NPU_ANSWERS[INFO], links: CommandResult | str = "X HCCS, HCCS X"
) -> LocalMachine:
    if isinstance(links, str):
        links = CommandResult(0, topology([row.split() for row in links.split(",")]))
    packages = {"torch": Package("2.7.1"), "torch_npu": Package("2.7.1")}
    return machine({}, packages, {INFO: info, f"{INFO} -t topo": links, **TRIED})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (machine(), {
            "torch": "error not found", "CANN": "note not found", "MindSpeed": "note not found",
            "MindSpeed-LLM": "note not found", "Megatron-LM": "note not found",  # fine on a CPU
            "NPUs": "note no NPU found (there is no npu-smi)",
        }),
        (with_packages("torch 2.7.1"), {"torch": "ok 2.7.1", "torch_npu": "note not found"}),
        (machine({}, {"torch": Package("2.7.1")}, NPU_ANSWERS), {"torch_npu": "error not found"}),
        (with_packages("torch 2.7.1+cpu torch_npu 2.7.1.post2"), {
            "torch_npu": "ok 2.7.1.post2", AUTOMATIC: "error unset",
            "import torch_npu": "warning failed: ImportError: libhccl.so: cannot",
        }),
        (with_packages("torch 2.7.1 torch_npu 2.6.0", **{AUTOMATIC: "0"}),
         {"torch_npu": "error 2.6.0 beside torch 2.7.1", AUTOMATIC: ""}),
        (with_packages("torch 2.9.0 torch_npu 2.9.0"), {"torch_npu": "ok 2.9.0"}),
        (with_packages("torch 2.9.0 torch_npu 2.9.0 mindspeed_llm 2.3.0"),
         {"torch_npu": "warning 2.9.0 with MindSpeed-LLM"}),
        (with_npus(), {
            "NPUs": "ok 2 x 910B3", "driver": "ok 25.2.0", "health": "warning NPU 1 (Warning)",
            "links": "ok 1 pairs HCCS", "HCCL_CONNECT_TIMEOUT": "warning unset",
            "import torch_npu": "error failed: ImportError: libhccl.so: cannot",
        }),
        (with_npus(CommandResult(0, INFO_A3)), {"NPUs": "ok 2 x Ascend910", "health": ""}),
        (with_npus(CommandResult(255, "dcmi failed\n")),
         {"NPUs": "error npu-smi info lists none: dcmi failed", "links": ""}),
        (with_npus(CommandResult(0, "+--+\n")),
         {"NPUs": "error npu-smi info lists none: +--+"}),
        (with_npus(links="X SIO HCCS_SW, SIO X HCCS_SW, HCCS_SW HCCS_SW X"),
         {"links": "ok 2 pairs HCCS_SW, 1 pairs SIO"}),
        (with_npus(links="X PHB HCCS, PHB X HCCS, HCCS HCCS X"),
         {"links": "warning 2 pairs HCCS, 1 pairs PHB"}),
        (with_npus(links=CommandResult(1, "not supported\n")),
         {"links": "note unknown: npu-smi info -t topo said not supported"}),
    ],
)  # fmt: skip
def test_findings(host: LocalMachine, expected: dict[str, str]) -> None:
    findings = {**dict.fromkeys(expected, ""), **found(host)}
    assert {what: findings[what] for what in expected} == expected
    for finding in diagnose(host)[1]:
        assert finding.advice or finding.level in ("ok", "note"), finding
        assert "{" not in finding.advice


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("HCCL_CONNECT_TIMEOUT",
         {None: "note", "600": "ok", "599": "warning", "0": "warning", "10m": "warning"}),
        ("HCCL_EXEC_TIMEOUT", {None: "ok", "0": "ok", "600": "ok", "60": "warning"}),
        ("HCCL_OP_RETRY_ENABLE", {None: "ok", "L0:0, L1:0": "ok", "L0:0, L1:1": "warning"}),
        ("HCCL_OP_EXPANSION_MODE", {None: "ok", "AI_CPU": "ok", "AIV": "warning"}),
        ("TORCH_HCCL_BLOCKING_WAIT", {"1": "warning", "0": "ok"}),
        ("ASCEND_LAUNCH_BLOCKING", {"1": "warning"}),
        ("TASK_QUEUE_ENABLE", {"0": "warning", None: "ok"}),
    ],
)  # fmt: skip
def test_a_variable(name: str, levels: dict[str | None, str]) -> None:
    for value, level in levels.items():
        host = machine({} if value is None else {name: value})
        assert found(host)[name].startswith(f"{level} {value or 'unset'}")


def test_cann(tmp_path: Path) -> None:
    assert found(machine(cann=tmp_path))["CANN"].startswith("error in ")
    home = machine({"ASCEND_TOOLKIT_HOME": str(tmp_path)})
    assert found(home)["CANN"] == f"warning no version in {tmp_path}"
    for version, level in (("8.1.RC1", "warning"), ("9.0.0", "warning"), ("9.1.0", "ok")):
        (tmp_path / "version.info").write_text(f"Version={version}\n", "utf-8")
        assert found(home)["CANN"] == f"{level} {version}"


# ------------------------------------------------------------------ MindSpeed's stack


def test_the_stack(tmp_path: Path) -> None:
    packages = stack(tmp_path)
    titles = {"mindspeed_llm": "MindSpeed-LLM", "mindspeed": "MindSpeed", "megatron": "Megatron-LM"}

    def changed(name: str, new: Package | str | None) -> str:
        """The finding about a package of another version, replaced or missing."""
        other = dataclasses.replace(packages[name], version=new) if isinstance(new, str) else new
        installed = {key: each for key, each in (packages | {name: other}).items() if each}
        return found(machine({}, installed))[titles[name]]

    for name, new, expected in (
        *(("mindspeed_llm", version, f"ok {version}")
          for version in ("2.2.0", "2.3.0", "26.0.0dev0", "26.0.0", "26.1.0")),
        ("mindspeed", dataclasses.replace(packages["mindspeed"], version=None), "ok unknown"),
        ("mindspeed", None, "error not found"),
        ("megatron", None, "error not found"),
        ("mindspeed_llm", None, "warning not found"),
        ("mindspeed_llm", "27.0.0", "warning 27.0.0"),
        ("mindspeed", "0.8.0", "error 0.8.0"),
        ("megatron", "0.13.0", "error 0.13.0"),
        # As of PyPI.
        ("megatron", Package("0.12.1", (tmp_path,)), "error 0.12.1, without training"),
        ("mindspeed_llm", Package("2.1.0", (tmp_path,)),
         "error 2.1.0, without tasks/megatron_adaptor_v2.py"),
    ):  # fmt: skip
        assert changed(name, new) == expected
    for version, level in (("0.12.0", "error"), ("0.12.1", "ok"), ("0.19.2", "ok"),
                           ("0.20.0", "error")):  # fmt: skip
        alone = machine({}, {"megatron": Package(version)})
        assert found(alone)["Megatron-LM"] == f"{level} {version}"


def test_a_branch_of_mindspeed_that_has_no_mindspeed_llm(tmp_path: Path) -> None:
    packages = stack(tmp_path)
    del packages["mindspeed_llm"]
    packages["mindspeed"] = dataclasses.replace(packages["mindspeed"], version="0.16.0")
    for version, level in (("0.16.1", "ok"), ("0.12.1", "error")):
        packages["megatron"] = dataclasses.replace(packages["megatron"], version=version)
        stated = found(machine({}, packages))
        assert stated["MindSpeed-LLM"] == "note not found"
        assert stated["MindSpeed"] == "ok 0.16.0"
        assert stated["Megatron-LM"] == f"{level} {version}"


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


# ------------------------------------------------------------------ together


def test_a_supported_set_on_npus_is_ready(tmp_path: Path) -> None:
    home = tmp_path / "cann" / "aarch64-linux"
    home.mkdir(parents=True)
    (home / "ascend_toolkit_install.info").write_text("package_name=a\nversion=8.3.RC1\n", "utf-8")
    variables = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "HCCL_CONNECT_TIMEOUT": "1200"}
    info = CommandResult(0, INFO_A2.replace("Warning", "OK     "))
    host = machine(variables, stack(tmp_path), {**NPU_ANSWERS, INFO: info})
    assert {finding.level for finding in diagnose(host)[1]} == {"ok"}
    assert found(host)["CANN"] == "ok 8.3.RC1"
    assert found(host)["import torch_npu"] == "ok NPUs: 2"
    verdict = diagnose(host)[0]
    assert verdict.startswith("ready: this machine can run CommFuse on 2 NPUs (0 errors, 0")
    cpu = diagnose(machine({}, {"torch": Package("2.13.0")}))[0]
    assert cpu.startswith("ready: this machine has no NPU and can run the CPU form, rehearsals")
    wrong = machine({}, stack(tmp_path / "other") | {"torch": Package("2.0")}, NPU_ANSWERS)
    assert diagnose(wrong)[0].startswith("not ready: torch, torch_npu (2 errors, ")


def test_this_machine(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command("no-npu-smi") == CommandResult(ABSENT, "there is no no-npu-smi")
    code = cli.main(["doctor"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("not ready: " if code else "ready: this machine ")
    assert lines[0] == ""
    assert lines[1].startswith("ok       Python: 3.")
    (version,) = [line.split(": ")[1] for line in lines if " torch: " in line]
    assert version.split("+")[0] == torch.__version__.split("+")[0]
    monkeypatch.setattr(LocalMachine, "this", machine)
    assert cli.main(["doctor"]) == 1
    assert "\nerror    torch: not found -> install torch 2.1 or newer" in capsys.readouterr().out
