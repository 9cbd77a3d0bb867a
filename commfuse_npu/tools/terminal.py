"""Terminal output: aligned tables, and a progress line.

Commands print Markdown.  In a pipe it is unchanged.  On a terminal its marks are left out, and the
columns of a table that fits are aligned.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

_RULE = re.compile(r"\|[-:| ]+\|")
# Not the stars of a traceback's f(**kwargs).
_MARKS = re.compile(r"^#+ |`|\*\*(?!\w+[,)])", re.M)
_CLEAR_LINE = "\r\x1b[K"


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
        redirects = (sys.stderr, redirect_stderr), (sys.stdout, redirect_stdout)
        for terminal, redirect in redirects:
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
        tell("")
        self.terminal.write(f"{text}\n")

    def _end_table(self) -> None:
        lines = self._table
        self._table = []
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        if len(lines) > 1 and _RULE.fullmatch(lines[1]) and len(set(map(len, cells))) == 1:
            columns = zip(cells[0], *cells[2:], strict=True)
            widths = [max(map(len, column)) for column in columns]
            right = [cell.endswith(":") for cell in cells[1]]
            cells[1] = ["-" * width for width in widths]
            if sum(widths) + 2 * len(widths) - 2 <= self.width:
                lines = ["  ".join(map(_padded, row, widths, right)).rstrip() for row in cells]
        for line in lines:
            self._print(line)


def _padded(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)
