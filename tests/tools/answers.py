"""The JSON that a command of ``commfuse-npu`` writes."""

import json
from pathlib import Path
from typing import Any

from commfuse_npu.tools import cli


def answer(folder: Path, command: str, *words: str, code: int = 0) -> Any:
    """The JSON of a command that ends with status ``code``; its file is in ``folder``."""
    page = folder / "answer.json"
    page.unlink(missing_ok=True)
    assert cli.main([command, "--json", str(page), *words]) == code
    return json.loads(page.read_text("utf-8"))
