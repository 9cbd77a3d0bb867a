"""What ``scripts/first_hour.sh`` asks for, in which order; nothing is measured here."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.launchers.launching import SCRIPTS, started

LAUNCH = str(SCRIPTS / "pretrain_llama3_8b_ptd.sh")


def start(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, str, list[list[str]]]:
    """Exit code, stderr, and the commands of commfuse-npu, without their program."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(
        f"#!/bin/sh\nshift 2\nprintf '%s\\0' \"$@\" >> {asked}\necho >> {asked}\n"
        'case "$1" in doctor) exit "${DOCTOR:-0}" ;; esac\n'
    )
    python.chmod(0o755)
    asked.unlink(missing_ok=True)
    run = started(
        *("bash", str(SCRIPTS / "first_hour.sh"), *arguments),
        folder=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHON": str(python), **variables},
    )
    lines = asked.read_text().splitlines() if asked.exists() else []
    return run.returncode, run.stderr, [line.split("\0")[:-1] for line in lines]


@pytest.mark.parametrize(
    ("arguments", "variables", "launch"),
    [
        # A launch that needs no files.
        ([], {}, [LAUNCH, "--tokenizer-type", "NullTokenizer", "--mock-data",
                  "--global-batch-size", "16"]),
        # Data that are given are used, and arguments passed on.
        (["--lr", "1e-5"], {"DATA_PATH": "d", "TOKENIZER_MODEL": "t"},
         [LAUNCH, "--global-batch-size", "16", "--lr", "1e-5"]),
        # A launch of one's own is left as it is.
        ([], {"LAUNCH": "my pretrain.sh"}, ["my pretrain.sh"]),
    ],
)  # fmt: skip
def test_doctor_first_then_the_launch(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], launch: list[str]
) -> None:
    code, _, (doctor, measure) = start(tmp_path, *arguments, RANKS="4", **variables)
    assert code == 0
    assert doctor == ["doctor", "--config", "llama3_8b"]
    options = "measure --device npu --ranks 4 --config llama3_8b --folder first_hour --minutes 50"
    assert measure[:-1] == [*options.split(), "--launch"]
    assert shlex.split(measure[-1]) == launch


def test_a_run_that_has_begun_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "first_hour").mkdir()
    (tmp_path / "first_hour" / "run.json").touch()
    _, _, (_, measure) = start(tmp_path)
    assert measure[-1] == "--resume"


def test_errors_of_the_doctor_come_first(tmp_path: Path) -> None:
    code, said, asked = start(tmp_path, DOCTOR="1")
    assert code == 1
    assert "the doctor found errors (above); mend them, or set ANYWAY=1" in said
    assert [words[0] for words in asked] == ["doctor"]
    code, _, asked = start(tmp_path, DOCTOR="1", ANYWAY="1")
    assert code == 0
    assert [words[0] for words in asked] == ["doctor", "measure"]


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    code, said, asked = start(tmp_path, DEVICE="gpu")
    assert code == 2
    assert "DEVICE is 'gpu'; set it to npu or cpu" in said
    assert asked == []
