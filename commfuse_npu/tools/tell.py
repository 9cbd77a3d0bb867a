"""What somebody who watches a terminal sees: what is being computed, and lines that fit."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

__all__ = ["tell", "wrapped_lines"]

_AS_IT_IS = re.compile(r"\|| {4}--| {4}[A-Z_]+=")
"""How rows of tables and options to be copied begin."""


def tell(what: str) -> None:
    """Say it in one line of stderr that is written over; an empty text wipes it.

    Nothing is said where stderr is no terminal.
    """
    if sys.stderr.isatty():
        print(f"\r{what[:79]:<79}\r", end="", file=sys.stderr, flush=True)


@contextmanager
def wrapped_lines() -> Iterator[None]:
    """Wrap long lines of stdout between words, indented as they begin, if it is a terminal.

    Tables and options are left to the terminal, which puts what it wrapped itself together again
    where it is copied.
    """
    if not sys.stdout.isatty():
        yield
        return
    wrapped = _Wrapped(sys.stdout)
    with redirect_stdout(cast(TextIO, wrapped)):
        try:
            yield
        finally:
            wrapped.flush()


class _Wrapped:
    def __init__(self, terminal: TextIO) -> None:
        self._terminal, self._line = terminal, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._terminal.write(f"{_wrapped(line)}\n")
        return len(text)

    def flush(self) -> None:
        self._terminal.write(self._line)
        self._line = ""
        self._terminal.flush()


def _wrapped(line: str) -> str:
    width = shutil.get_terminal_size().columns
    if len(line) <= width or _AS_IT_IS.match(line):
        return line
    begin = line[: len(line) - len(line.lstrip(" -"))]
    return "\n".join(
        textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * (len(begin) if "-" in begin else len(begin) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
