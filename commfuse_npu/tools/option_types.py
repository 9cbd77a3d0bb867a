"""What the commands' options may be: a parser that refuses in one line, and converters for it."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from commfuse_npu.tools.report.drawing import PAGES, lacking

__all__ = ["Parser", "new_file", "page", "positive", "refuse", "whole", "words"]


class Parser(argparse.ArgumentParser):
    """argparse whose refusal is one line: value, limit and way out; exit code 2.

    Options are written in full: what is short for one of them today may be short for two tomorrow.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [one for action in self._actions for one in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            self.error(
                f"unknown: {' '.join(unknown)}{f'; did you mean {near[0]}?' if near else ''}"
            )
        return given

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def refuse(command: str, error: Exception, code: int = 2) -> int:
    """Say on stderr, a line per problem, why a command has no answer; returns its exit code."""
    said = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        said = f"{error.filename}: {error.strerror}"
    for line in said.splitlines():
        print(f"commfuse-npu {command}: error: {line}", file=sys.stderr)
    return code


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A converter for a whole number from ``least`` to ``most``, without end by default."""
    span = f"from {least}" + (f" to {most}" if most is not None else "")

    def convert(text: str) -> int:
        # No number of this project has more digits, and int() takes at most 4,300.
        digits = text.removeprefix("-")
        number = int(text) if digits.isdecimal() and len(digits) <= 18 else None
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number {span}")
        return number

    return convert


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return number


def words(text: str) -> tuple[str, ...]:
    """A list with commas in between."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty list; give one word at least")
    return found


def new_file(text: str) -> Path:
    """A file that can be written: its folder is there, before what takes minutes begins."""
    path = Path(text)
    folder = path.resolve().parent
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file; give one")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} needs the folder {folder}, which is not there; make it, or choose another"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {text!r}; choose another file")
    return path


def page(text: str) -> Path:
    """A file for a page with pictures, where they can be drawn."""
    path = new_file(text)
    if path.suffix.lower() not in PAGES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a page; let it end in {' or '.join(PAGES)}"
        )
    if why := lacking():
        raise argparse.ArgumentTypeError(f"{text!r} {why}, or leave the option out")
    return path
