"""Files that appear whole or not at all, whoever reads meanwhile and whatever fails."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["whole_file", "write_json"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Another name to write to, of the same ending; at the end it takes the place of ``path``.

    Folders are made.  If anything fails, a full disk above all, what was there is there still, and
    nothing else is left.

    Raises:
        OSError: it cannot be written.
    """
    if (path.exists() and not path.resolve().is_file()) or path.is_relative_to("/dev"):
        yield path  # a terminal, a pipe: nothing that could be replaced
        return
    path = path.resolve()  # a link stays, what it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".part-", suffix=path.suffix, dir=path.parent)
    part = Path(name)
    try:
        # As open() would have made it, and not for its owner alone.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)
        yield part
        # A disk may say only now that it is full.
        os.fsync(descriptor)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write ``content`` to ``path``, in place of what was there.

    Raises:
        OSError: it cannot be written, see :func:`whole_file`.
    """
    with whole_file(path) as part, part.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent)
        file.write("\n")
