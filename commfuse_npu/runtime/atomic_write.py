"""Atomic writes: a reader sees the old file or the complete new one, also after a failure."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["atomic_write", "write_json"]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file with the same suffix, which replaces ``path`` at the end of the block.

    Creates missing folders.  If the block or the write fails (a full disk), the old file stays and
    the temporary one is removed.  A terminal or pipe is yielded itself.

    Raises:
        OSError: the file cannot be written.
    """
    if (path.exists() and not path.resolve().is_file()) or path.is_relative_to("/dev"):
        yield path  # a terminal or a pipe cannot be replaced
        return
    path = path.resolve()  # keep a link and replace its target
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".part-", suffix=path.suffix, dir=path.parent)
    part = Path(name)
    try:
        # The mode that open() gives a file; mkstemp makes it readable by the owner only.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)
        yield part
        # The error of a full disk may come only here.
        os.fsync(descriptor)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write ``content`` to ``path`` atomically, see :func:`atomic_write`.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_write(path) as part, part.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent)
        file.write("\n")
