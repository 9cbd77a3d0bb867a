"""What environment.sh installs, in which order, with a stand-in for Python."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.launchers.launching import ROOT, SCRIPTS, started

PINNED = (SCRIPTS / "requirements" / "torch.txt").read_text("utf-8")
(TORCH,) = re.findall(r"^torch==(.+)$", PINNED, re.M)
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
CONFIGURED = rf"--no-deps torch=={re.escape(TORCH)}\+cpu"
"""Arguments of pip for torch from the configured indexes."""

# Logs its arguments and fails if FAIL matches them. A virtual environment has a copy of it.
PYTHON = """#!/bin/bash
echo "$*" >> "$ASKED"
if [ "$1" = --version ]; then echo Python 3.9.1; fi
if [[ "$*" =~ ${FAIL:-^nothing} ]]; then echo "traceback"$'\\n'"Error: no space" >&2; exit 1; fi
if [[ "$*" =~ sysconfig ]]; then echo "${0%/bin/python}/site"; fi
venv="${@: -1}"
if [ "$2" = venv ]; then mkdir -p "$venv"/{bin,site}; cp "$0" "$venv/bin/python"; fi
if [ "$2" = venv ]; then touch "$venv/bin/pip"; fi
"""


class Machine:
    """A machine without packages, whose Python is a stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.venv, self.asked = folder, folder / "venv", folder / "asked"
        for name in ("python3", "python3.12"):
            (folder / name).write_text(PYTHON, "utf-8")
            (folder / name).chmod(0o755)

    def prepare(self, fail: str = "", sets: str = "cpu test") -> tuple[int, str, list[str]]:
        """Commands of Python that match ``fail`` fail; ``sets`` are installed besides torch.

        Returns the exit code, stderr, and the arguments of each pip install after the usual ones.
        """
        self.asked.write_text("", "utf-8")
        script = f'source "{ROOT}/scripts/environment.sh"; prepare_environment {sets}'
        settings = {"COMMFUSE_VENV": str(self.venv), "ASKED": str(self.asked), "FAIL": fail}
        path = f"{self.folder}:{os.environ['PATH']}"
        run = started("bash", "-c", script, env={"PATH": path, **settings})
        usual = "-m pip install --quiet --disable-pip-version-check --no-deps "
        lines = re.findall(r"^-m pip.*", self.asked.read_text("utf-8"), re.M)
        requests = [line.removeprefix(usual).replace(f"{ROOT}/", "") for line in lines]
        return run.returncode, run.stderr, requests


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


REST = [
    "--requirement scripts/requirements/cpu.txt",
    "--requirement scripts/requirements/test.txt",
    f"--no-build-isolation --editable {ROOT}",
]
FIRST = f"torch=={TORCH}+cpu"
SECOND = f"--timeout 15 --retries 1 --index-url {CPU_BUILDS} {FIRST}"
THIRD = "-m pip install --disable-pip-version-check --requirement scripts/requirements/torch.txt"
TORCH_FILE = "--requirement scripts/requirements/torch.txt"


ALL = [FIRST, TORCH_FILE, *REST]


@pytest.mark.parametrize(
    ("fail", "code", "said", "requests", "left"),
    [
        # A CPU build comes before one with CUDA.
        ("", 0, "is from the configured indexes.", ALL, []),
        (CONFIGURED, 0, f"is from {CPU_BUILDS}.", [FIRST, SECOND, TORCH_FILE, *REST], []),
        (r"\+cpu", 0, "is from the configured indexes, with its dependencies.",
         [FIRST, SECOND, THIRD, TORCH_FILE, *REST], []),
        # A torch that cannot be imported does not count as installed.
        ("import torch", 1, "from the configured indexes, cannot be imported: Error: no space",
         [FIRST, TORCH_FILE], ALL),
        # A failed installation goes on where it stopped.
        ("-m venv", 1, "Error: no space", [], ALL),
        ("requirements/cpu", 1, "Error: no space", [FIRST, TORCH_FILE, REST[0]], REST),
        ("--editable", 1, "Error: no space", ALL, REST[2:]),
    ],
)  # fmt: skip
def test_what_is_installed(
    machine: Machine, fail: str, code: int, said: str, requests: list[str], left: list[str]
) -> None:
    ended, stderr, asked = machine.prepare(fail)
    assert (min(ended, 1), asked) == (code, requests), stderr
    assert said in stderr
    assert ("GB to download" in stderr) == (THIRD in requests)
    assert (f"Remove {machine.venv} and start again.\n" in stderr) == (fail == "import torch")
    assert machine.prepare()[::2] == (0, left)
    # A changed requirements file is installed again.
    (machine.venv / ".installed-cpu").write_text("numpy==1.0\n", "utf-8")
    assert machine.prepare()[::2] == (0, REST[:1])
    assert machine.prepare() == (0, "", [])


def test_torch_npu_is_left_out_beside_a_torch_with_cuda(machine: Machine) -> None:
    library = machine.venv / "site" / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    code, stderr, requests = machine.prepare(r"\+cpu", "npu")
    assert (code, requests) == (0, [FIRST, SECOND, THIRD, TORCH_FILE, REST[2]])
    assert "torch_npu cannot be loaded beside a torch with CUDA.\nNo " in stderr


def test_cann_stand_ins_are_written_anew_for_another_torch_npu(machine: Machine) -> None:
    installed = Path(f"{machine.venv}-npu") / ".installed-npu"
    for fail, changed, expected in (
        ("cann_stubs", False, 1),
        ("", False, 1),
        ("", False, 0),
        ("", True, 1),
    ):
        if changed:
            installed.write_text("torch_npu==1.0\n", "utf-8")
        code, stderr, _ = machine.prepare(fail, "npu")
        assert code == 0, stderr
        assert ("tests/npu will be skipped" in stderr) == bool(fail)
        assert machine.asked.read_text("utf-8").count("cann_stubs.py") == expected


def test_the_newest_core_is_left_out_without_its_python(machine: Machine) -> None:
    usual = [FIRST, TORCH_FILE, REST[2]]
    code, stderr, requests = machine.prepare("^--version", "core")
    assert (code, requests) == (0, usual)
    assert "The newest Megatron core needs python3.12, which was not found.\nNo " in stderr
    core = "--requirement scripts/requirements/core.txt"
    assert machine.prepare("requirements/core", "core")[::2] == (0, [FIRST, TORCH_FILE, core])
    assert machine.prepare("", "core")[::2] == (0, [core])
    assert machine.prepare("", "core") == (0, "", [])


def test_the_newest_core_is_left_out_without_a_cpu_torch(machine: Machine) -> None:
    code, stderr, requests = machine.prepare(r"\+cpu", "core")
    assert (code, requests) == (0, [FIRST, SECOND, THIRD, TORCH_FILE, REST[2], FIRST, SECOND])
    assert f"No CPU build of torch {TORCH} for this Python was found" in stderr


def test_a_launch_without_torch_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    hidden = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['pretrain_gpt.py']; "
    run = "import runpy; runpy.run_module('mindspeed_patches.launch', run_name='__main__')"
    done = started(
        sys.executable, "-c", hidden + run, env={"PYTHONPATH": str(ROOT)}, folder=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith("mindspeed_patches.launch: torch is not installed; start it")
    assert done.stderr.count("\n") == 1
