"""Files that a command is asked for besides what it prints: one that fails keeps none back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.terminal import tell

__all__ = ["Output", "write_outputs"]


class Output(NamedTuple):
    """A file: the option that asks for it, its name if it was asked for, what is in it, how."""

    option: str
    path: Path | None
    what: str
    write: Callable[[Path], None]


def write_outputs(command: str, outputs: Sequence[Output]) -> int:
    """Write each file that is asked for, in this order, and say on stdout which there are.

    Returns:
        0; or 2 if one of them could not be written, which is said on stderr.
    """
    code = 0
    for option, path, what, write in outputs:
        if path is None:
            continue
        tell(f"writing {path}")
        try:
            write(path)
        except OSError as error:
            why = error.strerror or error
            said = f"error: {option} {path} was not written: {why}; all else is there"
            print(f"commfuse-npu {command}: {said}", file=sys.stderr)
            code = 2
        else:
            print(f"\nWritten: {path}{what}", end="")
    if any(path is not None for _, path, _, _ in outputs):
        print()
    return code
