"""A command-line parser with one-line errors, converters for its options, and output files."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from commfuse_npu.runtime.atomic_write import write_json


class Parser(argparse.ArgumentParser):
    """An argparse parser whose error is one line: value, limit and remedy; exit code 2.

    Options cannot be abbreviated: an abbreviation that is unique today may become ambiguous.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def refuse(command: str, error: Exception, code: int = 2) -> int:
    """Print to stderr, one line per problem, why a command failed; returns its exit code."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    for line in message.splitlines():
        print(f"commfuse-npu {command}: error: {line}", file=sys.stderr)
    return code


_MOST = 1e9
"""Larger times, rates and ratios make no sense, and system calls would not accept them."""


def positive(text: str) -> float:
    """Convert to a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0, up to {_MOST:g}")
    return number


def new_file(text: str) -> Path:
    """A file that can be written; checked before a long computation starts."""
    path = Path(text)
    folder = path.resolve().parent
    writable = folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)
    if not text or path.is_dir() or not writable:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; give a file in a folder that is there and yours"
        )
    return path


def write_output(path: Path | None, description: str, write: Callable[[Path], None]) -> None:
    """Write a file, if it is requested, and name it on stdout.

    Raises:
        OSError: it cannot be written; names the file.
    """
    if not path:
        return
    try:
        write(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    print(f"\nWritten: {path}{description}")


def write_figures(path: Path | None, content: object) -> None:
    """:func:`write_output` of the figures of a command, as JSON."""
    write_output(path, ": all figures", lambda file: write_json(file, content, indent=1))
