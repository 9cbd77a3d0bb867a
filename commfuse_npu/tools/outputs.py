"""Files that a command writes besides its output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from commfuse_npu.tools.terminal import tell

__all__ = ["write_output"]


def write_output(path: Path | None, description: str, write: Callable[[Path], None]) -> None:
    """Write a file, if it is requested, and name it on stdout.

    Raises:
        OSError: it cannot be written; names the file.
    """
    if path is None:
        return
    tell(f"writing {path}")
    try:
        write(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    print(f"\nWritten: {path}{description}")
