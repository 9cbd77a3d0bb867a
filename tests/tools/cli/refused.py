"""Ask what makes no sense, in a process of its own, and print what came of each as JSON.

``python -m tests.tools.cli.refused`` reads a question per line, as a shell has it.  Those to the
CPU pretraining come last: it imports torch.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from commfuse_npu.tools import cli
from tests.limits import LIMIT

ROOT = Path(__file__).resolve().parents[3]


def answers_to(questions: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What came of each question, asked in a folder; by question."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.cli.refused"],
        input="\n".join(questions),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return {answer["question"]: answer for answer in json.loads(done.stdout)}


def content(folder: Path) -> list[str]:
    return sorted(f"{path} {path.stat().st_size}" for path in folder.rglob("*"))


def asked(question: str) -> dict[str, object]:
    words = shlex.split(question)
    before, out, error = content(Path()), io.StringIO(), io.StringIO()
    code: object
    with redirect_stdout(out), redirect_stderr(error):
        try:
            code = launched(words[1:]) if words[0] == "pretrain" else cli.main(words)
        except SystemExit as end:
            code = end.code
        except Exception as failure:
            code = repr(failure)
    return {
        "question": question,
        "code": code,
        "out": out.getvalue(),
        "error": error.getvalue(),
        "written": [one for one in content(Path()) if one not in before],
        "torch": "torch" in sys.modules,
        "drawing": not {"matplotlib", "numpy", "vl_convert"}.isdisjoint(sys.modules),
    }


def launched(words: list[str]) -> int:
    from scripts.cpu_pretraining import __main__ as command

    with mock.patch.object(command, "Ranks", side_effect=AssertionError("it started ranks")):
        return command.main(words)


if __name__ == "__main__":
    print(json.dumps([asked(line.rstrip("\n")) for line in sys.stdin]))
