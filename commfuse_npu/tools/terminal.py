"""Terminal output: aligned tables, and a progress line.

Commands print Markdown.  In a pipe it is unchanged.  On a terminal its marks are left out, lines
are wrapped between words, and the columns of a table are aligned.  If a table is too wide, the long
cells of its last column become footnotes, and then ranges are left out.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

_RULE = re.compile(r"\|[-:| ]+\|")
# Not the stars of a traceback's f(**kwargs).
_MARKS = re.compile(r"^#+ |`|\*\*(?!\w+[,)])", re.M)
_CLEAR_LINE = "\r\x1b[K"
_CODE = "    "
"""Lines that begin so are commands, which are to be copied."""
_ITEM = re.compile(r" *(- |\[\d+\] )?")
"""What later lines of an item are indented by."""
_RANGE = re.compile(r" \([^()]+ to [^()]+\)$")
_SHORT_CELL = 8
"""Longer cells may become footnotes."""


def table_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table_head(cells: Sequence[str], numbers: bool = True) -> str:
    """The header row and the rule; columns after the first are right-aligned if ``numbers``."""
    return f"{table_row(cells)}\n|---{('|---:' if numbers else '|---') * (len(cells) - 1)}|"


@contextmanager
def rendered() -> Iterator[None]:
    """Context manager that renders output to a terminal."""
    with ExitStack() as ended:
        for terminal, redirect in ((sys.stderr, redirect_stderr), (sys.stdout, redirect_stdout)):
            if terminal and terminal.isatty():
                stream = _Rendered(terminal)
                ended.callback(stream.end)
                ended.enter_context(redirect(cast(TextIO, stream)))
        ended.callback(tell, "")
        yield


def tell(what: str) -> None:
    """Show a text in the last line of stderr until something is printed; only on a terminal."""
    if isinstance(sys.stderr, _Rendered) and os.environ.get("TERM") != "dumb":
        # Not up to the last column, where a terminal begins another line.
        sys.stderr.terminal.write(f"{_CLEAR_LINE}{what[: sys.stderr.width - 1]}")
        sys.stderr.terminal.flush()


class _Rendered:
    """A text stream that renders Markdown to a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.width = shutil.get_terminal_size().columns
        self._line = ""
        self._table = list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)

    def write(self, text: str) -> int:
        *lines, self._line = _MARKS.sub("", self._line + text).split("\n")
        for line in lines:
            if line.startswith("|"):
                self._table.append(line)
            else:
                self._end_table()
                self._print(line)
        return len(text)

    def end(self) -> None:
        """Flush an incomplete line or table."""
        if self._line:
            self.write("\n")
        self._end_table()

    def _print(self, text: str) -> None:
        if len(text) > self.width and not text.startswith(_CODE):
            hanging = _ITEM.match(text)
            text = textwrap.fill(
                text,
                self.width,
                subsequent_indent=" " * (hanging.end() if hanging else 0),
                break_long_words=False,
                break_on_hyphens=False,
            )
        self._print_line(text)

    def _print_line(self, text: str) -> None:
        tell("")
        self.terminal.write(f"{text}\n")

    def _end_table(self) -> None:
        lines = self._table
        self._table = []
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        notes: list[str] = []
        if len(lines) > 1 and _RULE.fullmatch(lines[1]) and len(set(map(len, cells))) == 1:
            rule = cells.pop(1)
            if _width_of(cells) > self.width:
                notes = _move_to_notes(cells[1:])
            if _width_of(cells) > self.width:
                cells = [[_RANGE.sub("", cell) for cell in row] for row in cells]
            widths = _widths(cells)
            cells.insert(1, ["-" * width for width in widths])
            sides = (">" if cell.endswith(":") else "<" for cell in rule)
            formats = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
            lines = ["  ".join(map(format, row, formats)).rstrip() for row in cells]
        for line in lines:
            self._print_line(line)
        for number, note in enumerate(notes, 1):
            self._print(f"[{number}] {note}")


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _width_of(rows: Sequence[Sequence[str]]) -> int:
    return sum(_widths(rows)) + 2 * len(rows[0]) - 2


def _move_to_notes(rows: Sequence[list[str]]) -> list[str]:
    """Replace the long last cells of rows by numbers; return the cells, each once."""
    notes = list(dict.fromkeys(row[-1] for row in rows if len(row[-1]) > _SHORT_CELL))
    for row in rows:
        if row[-1] in notes:
            row[-1] = f"[{notes.index(row[-1]) + 1}]"
    return notes
