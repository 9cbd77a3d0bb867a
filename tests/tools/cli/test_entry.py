"""How the command is called, and questions to which there is no answer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commfuse_npu import __version__
from commfuse_npu.tools.cli import main


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commfuse_npu", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.stdout == f"commfuse-npu {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify --max-ranks 0", "argument --max-ranks: 0 is not a whole number from 1"),
        ("verify --max-ranks -3", "argument --max-ranks: -3 is not a whole number from 1"),
        ("verify --min-ranks 9 --max-ranks 4", "--min-ranks 9 is more than --max-ranks 4"),
        ("verify --chunks 0", "argument --chunks: 0 is not a whole number from 1"),
        ("plan gemm_scatter --ranks 4 --lanes 9", "--lanes 9: 4 ranks have 3 peers"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words.split())
    except SystemExit as end:
        code = int(str(end.code))
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert said in printed.err
