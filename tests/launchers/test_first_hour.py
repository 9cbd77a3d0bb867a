"""What ``scripts/first_hour.sh`` asks for, in which order; nothing is measured here."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.limits import LIMIT

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "first_hour.sh"
LAUNCH = ROOT / "scripts" / "pretrain_llama3_8b_ptd.sh"


@pytest.fixture
def asked(tmp_path: Path) -> list[list[str]]:
    """Not filled before :func:`start`: commands of commfuse-npu."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {tmp_path}/asked\n"
        'case "$3" in doctor) exit "${DOCTOR:-0}" ;; esac\n'
    )
    python.chmod(0o755)
    return []


def start(
    tmp_path: Path, asked: list[list[str]], *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    known = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python")}
    run = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=tmp_path,
        env={**known, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if (tmp_path / "asked").exists():
        asked[:] = [line.split(" ", 3)[2:] for line in (tmp_path / "asked").open()]
    return run


def launched(measure: list[str]) -> list[str]:
    """The launch among the words of measure; it is the last one, and is quoted once more."""
    return shlex.split(measure[1].partition("--launch ")[2].partition(" --resume")[0])


def test_doctor_first_then_a_launch_that_needs_no_files(
    tmp_path: Path, asked: list[list[str]]
) -> None:
    assert start(tmp_path, asked).returncode == 0
    doctor, measure = asked
    assert doctor == ["doctor", "--config llama3_8b\n"]
    assert measure[0] == "measure"
    assert measure[1].startswith("--device npu --ranks 8 --config llama3_8b --folder first_hour")
    assert "--resume" not in measure[1]
    assert launched(measure) == [
        *(str(LAUNCH), "--tokenizer-type", "NullTokenizer", "--mock-data"),
        *("--global-batch-size", "16"),
    ]


def test_data_that_are_given_are_used_and_arguments_passed_on(
    tmp_path: Path, asked: list[list[str]]
) -> None:
    variables = {"DATA_PATH": "d", "TOKENIZER_MODEL": "t"}
    start(tmp_path, asked, "--lr", "1e-5", **variables)
    assert launched(asked[1]) == [str(LAUNCH), "--global-batch-size", "16", "--lr", "1e-5"]


def test_a_launch_of_ones_own_is_left_as_it_is(tmp_path: Path, asked: list[list[str]]) -> None:
    start(tmp_path, asked, LAUNCH="my pretrain.sh", RANKS="4")
    assert launched(asked[1]) == ["my pretrain.sh"]
    assert "--ranks 4" in asked[1][1]


def test_a_run_that_has_begun_is_gone_on_with(tmp_path: Path, asked: list[list[str]]) -> None:
    (tmp_path / "first_hour").mkdir()
    (tmp_path / "first_hour" / "run.json").touch()
    start(tmp_path, asked)
    assert asked[1][1].endswith("--resume\n")


def test_errors_of_the_doctor_come_first(tmp_path: Path, asked: list[list[str]]) -> None:
    run = start(tmp_path, asked, DOCTOR="1")
    assert run.returncode == 1
    assert "the doctor found errors (above); mend them, or set ANYWAY=1" in run.stderr
    assert [words[0] for words in asked] == ["doctor"]
    assert start(tmp_path, asked, DOCTOR="1", ANYWAY="1").returncode == 0
    assert [words[0] for words in asked] == ["doctor", "doctor", "measure"]


def test_an_unknown_device_is_refused(tmp_path: Path, asked: list[list[str]]) -> None:
    run = start(tmp_path, asked, DEVICE="gpu")
    assert run.returncode == 2
    assert "DEVICE is 'gpu'; set it to npu or cpu" in run.stderr
    assert asked == []
