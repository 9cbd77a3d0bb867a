"""Ask what makes no sense, in a process of its own, and print what came of each as JSON.

``python -m tests.tools.cli.refused FOLDER`` reads a question per line; a word that is ``''`` is
empty.  Those to the CPU pretraining come last: it imports torch.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from commfuse_npu.tools import cli


def content(folder: Path) -> list[str]:
    return sorted(f"{path} {path.stat().st_size}" for path in folder.rglob("*"))


def asked(question: str) -> dict[str, object]:
    words = ["" if word == "''" else word for word in question.split()]
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
