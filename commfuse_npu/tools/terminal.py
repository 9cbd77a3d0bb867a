"""Terminal output: aligned tables, colors, and a progress line.

Commands print Markdown.  In a pipe it is unchanged.  On a terminal lines are wrapped between words,
and the columns of a table that fits are aligned.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

__all__ = ["print_verdict", "rendered", "table_head", "table_row", "tell"]

_RULE = re.compile(r"\|[-:| ]+\|")
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_STYLES = (
    (re.compile(r"^#+ (.*)|\*\*(.+?)\*\*", re.S), "\x1b[1m\\1\\2\x1b[22m"),
    (re.compile(r"`([^`]+)`"), "\x1b[36m\\1\x1b[39m"),
    (re.compile(r"^( *|.*?: )(error|warning)\b(?=$|[: ])", re.S), "\\1\x1b[31m\\2\x1b[39m"),
)
_VERDICTS = {True: "\x1b[1;32m", False: "\x1b[1;31m", None: "\x1b[1m"}
_CLEAR_LINE = "\r\x1b[K"


def table_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table_head(cells: Sequence[str], numbers: bool = True) -> str:
    """The header row and the rule; columns after the first are right-aligned if ``numbers``."""
    return f"{table_row(cells)}\n|---{('|---:' if numbers else '|---') * (len(cells) - 1)}|"


@contextmanager
def rendered(doing: str) -> Iterator[None]:
    """Context manager that renders output to a terminal, and first tells what is done."""
    with ExitStack() as ended:
        redirects = (sys.stderr, redirect_stderr), (sys.stdout, redirect_stdout)
        for terminal, redirect in redirects:
            if terminal and terminal.isatty():
                stream = _Rendered(terminal)
                ended.callback(stream.end)
                ended.enter_context(redirect(cast(TextIO, stream)))
        ended.callback(tell, "")
        tell(doing)
        yield


def tell(what: str) -> None:
    """Show a text in the last line of stderr until something is printed; only on a terminal."""
    if isinstance(sys.stderr, _Rendered) and os.environ.get("TERM") != "dumb":
        # Not up to the last column, where a terminal begins another line.
        while _width(what) >= sys.stderr.width:
            what = what[:-1]
        sys.stderr.terminal.write(f"{_CLEAR_LINE}{what}")
        sys.stderr.terminal.flush()


def print_verdict(text: str, good: bool | None = None) -> None:
    """Print the answer of a command; on a terminal green if ``good``, red if not."""
    if isinstance(sys.stdout, _Rendered):
        sys.stdout.render(text, _VERDICTS[good])
    else:
        print(text)


class _Rendered:
    """A text stream that renders Markdown to a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal, self.width = terminal, shutil.get_terminal_size().columns
        self.styled = os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
        self._line, self._table = "", list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.startswith("|"):
                self._table.append(line)
            else:
                self.render(line)
        return len(text)

    def end(self) -> None:
        """Flush an incomplete line or table."""
        if self._line:
            self.write("\n")
        self._end_table()

    def render(self, line: str, style: str = "") -> None:
        """Print a line outside of tables, wrapped between words with a hanging indent."""
        self._end_table()
        if not line.startswith("    "):  # code, to be copied
            begin = line[: len(line) - len(line.lstrip(" -"))]
            indent = " " * (len(begin) if "-" in begin else len(begin) + 2)
            line = textwrap.fill(
                line,
                self.width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        self._print(f"{style}{_styled(line)}\x1b[0m" if style else _styled(line))

    def _print(self, text: str) -> None:
        tell("")
        self.terminal.write(f"{text if self.styled else _plain(text)}\n")

    def _end_table(self) -> None:
        lines, self._table = self._table, []
        if not lines:
            return
        head, *rows = ([_styled(cell.strip()) for cell in line.split("|")[1:-1]] for line in lines)
        if rows and _RULE.fullmatch(lines[1]) and {len(head)} == set(map(len, rows)):
            rules = [cell.endswith(":") for cell in rows.pop(0)]
            columns = zip(head, *rows, strict=True)
            widths = [max(map(_width, column)) for column in columns]
            if sum(widths) + 2 * len(widths) - 2 <= self.width:
                for row in (head, ["-" * width for width in widths], *rows):
                    self._print("  ".join(map(_padded, row, widths, rules)).rstrip())
                return
        for line in lines:
            self._print(_styled(line))


def _plain(text: str) -> str:
    return _ESCAPE.sub("", text)


def _styled(text: str) -> str:
    for pattern, style in _STYLES:
        text = pattern.sub(style, text)
    return text


def _width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in _plain(text))


def _padded(cell: str, width: int, number: bool) -> str:
    room = " " * (width - _width(cell))
    return f"{room}{cell}" if number else f"{cell}{room}"
