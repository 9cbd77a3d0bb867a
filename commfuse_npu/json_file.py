"""JSON files that appear whole or not at all, whoever reads meanwhile and whatever fails."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["write_whole"]


def write_whole(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write ``content`` to ``path``, in place of what was there; folders are made.

    Raises:
        OSError: it cannot be written; what was there is there still, and nothing else is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
    ) as file:
        part = Path(file.name)
        try:
            json.dump(content, file, indent=indent)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
