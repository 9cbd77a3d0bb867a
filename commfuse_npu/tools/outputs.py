"""Files that a command writes besides its output; one that fails does not prevent the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.terminal import tell

__all__ = ["Output", "write_outputs"]


class Output(NamedTuple):
    """A file: its option, its path if requested, a description, and the function to write it."""

    option: str
    path: Path | None
    description: str
    write: Callable[[Path], None]


def write_outputs(command: str, outputs: Sequence[Output]) -> int:
    """Write each requested file, in this order, and list the written ones on stdout.

    Returns:
        0, or 2 if one of them could not be written, which is reported on stderr.
    """
    code = 0
    for option, path, description, write in outputs:
        if path is None:
            continue
        tell(f"writing {path}")
        try:
            write(path)
        except OSError as error:
            why = error.strerror or error
            message = f"error: {option} {path} was not written: {why}; all other files were written"
            print(f"commfuse-npu {command}: {message}", file=sys.stderr)
            code = 2
        else:
            print(f"\nWritten: {path}{description}", end="")
    if any(path is not None for _, path, _, _ in outputs):
        print()
    return code
