"""Terminal output: tables that fit its width, colors, and a progress line.

Commands print Markdown.  On a terminal rich renders it, one line or table at a time; in a pipe, or
if rich is not installed, it is printed unchanged.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

__all__ = ["print_verdict", "rendered", "tell"]

_RULE = re.compile(r"\|[-:| ]+\|")
_INLINE = re.compile(r"\*\*(?P<bold>.+?)\*\*|`(?P<cyan>[^`]+)`")
_LEVELS = {
    "bold red": re.compile(r"^ *error\b|(?<=: )error(?=: )"),
    "yellow": re.compile(r"^ *warning\b|(?<=: )warning(?=: )"),
}
_VERDICTS = {True: "bold green", False: "bold red", None: "bold"}
_progress: Live | None = None


@contextmanager
def rendered(doing: str) -> Iterator[None]:
    """Context manager that renders output to a terminal and shows the current activity.

    Args:
        doing: shown until :func:`tell` replaces it, or something is printed.
    """
    global _progress
    with ExitStack() as ended:
        if find_spec("rich") is not None:
            if sys.stderr and sys.stderr.isatty():
                _progress = _spinner(sys.stderr)
                ended.callback(_forget_progress)
            redirects = (sys.stderr, redirect_stderr), (sys.stdout, redirect_stdout)
            for terminal, redirect in redirects:
                if terminal and terminal.isatty():
                    stream = _Rendered(terminal)
                    ended.callback(stream.end)
                    ended.enter_context(redirect(cast(TextIO, stream)))
        tell(doing)
        yield


def _spinner(terminal: TextIO) -> Live:
    from rich.console import Console
    from rich.live import Live

    kept = {"redirect_stdout": False, "redirect_stderr": False}
    console = Console(file=terminal)
    return Live(console=console, transient=True, refresh_per_second=5, **kept)


def _forget_progress() -> None:
    global _progress
    _hide_progress()
    _progress = None


def _hide_progress() -> None:
    if _progress is not None:
        _progress.stop()


def tell(what: str) -> None:
    """Show a text in the last line of stderr until something is printed; only on a terminal."""
    if _progress is not None:
        from rich.spinner import Spinner
        from rich.text import Text

        _progress.update(Spinner("dots", Text(what, no_wrap=True, overflow="ellipsis")))
        _progress.start()


def print_verdict(text: str, good: bool | None = None) -> None:
    """Print the answer of a command; on a terminal green if ``good``, red if not."""
    if isinstance(sys.stdout, _Rendered):
        sys.stdout.render(text, _VERDICTS[good])
    else:
        print(text)


class _Rendered:
    """A text stream that renders Markdown to a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        from rich.console import Console

        width, height = shutil.get_terminal_size()
        self._terminal = terminal
        self._console = Console(file=terminal, width=width, height=height, highlight=False)
        self._line, self._table = "", list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

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
        self._end_table()
        if self._line:
            self.render(self._line, end="")
        self._line = ""

    def render(self, line: str, style: str = "", end: str = "\n") -> None:
        """Print a line outside of tables, wrapped between words with a hanging indent."""
        from rich.text import Text

        self._end_table()
        if line.startswith("    "):  # code, to be copied
            self._write(Text(line), end)
            return
        if heading := re.match("#+ ", line):
            line, style = line[heading.end() :], style or "bold"
        begin = line[: len(line) - len(line.lstrip(" -"))]
        text = _inline(line, style)
        for level, pattern in _LEVELS.items():
            text.highlight_regex(pattern, level)
        indent = " " * (len(begin) if "-" in begin else len(begin) + 2)
        breaks, width = [0], self._console.width
        for word in re.finditer(r"\S+", text.plain):
            if word.end() - breaks[-1] > width and text.plain[: word.start()].strip(" -"):
                breaks.append(word.start())
                width = self._console.width - len(indent)
        lines = text.divide(breaks[1:])
        for part in lines:
            part.rstrip()
        self._write(Text("\n" + indent).join(lines), end)

    def _write(self, text: Any, end: str = "\n") -> None:
        _hide_progress()
        self._console.print(text, end=end, soft_wrap=True)

    def _end_table(self) -> None:
        from rich import box
        from rich.table import Table

        lines, self._table = self._table, []
        if not (len(lines) > 1 and _RULE.fullmatch(lines[1])):
            for line in lines:
                self._write(_inline(line))
            return
        head, rules, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
        sides = ["right" if rule.endswith(":") else "left" for rule in rules]
        rows = [[*row, *("" for _ in head)][: len(head)] for row in rows]
        columns = [[_inline(row[index]) for row in rows] for index in range(len(head))]
        widths = _widths(head, columns, sides, self._console.width)
        if not widths:
            for row in rows:
                pairs = (f"{name}: {cell}" for name, cell in zip(head[1:], row[1:], strict=True))
                self.render(f"- {head[0]} {row[0]}: {', '.join(pairs)}")
            return
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for name, side, width in zip(head, sides, widths, strict=True):
            table.add_column(name, justify=side, width=width, overflow="fold")
        for cells in zip(*columns, strict=True):
            table.add_row(*cells)
        _hide_progress()
        self._console.print(table)


def _widths(
    head: Sequence[str], columns: Sequence[Sequence[Text]], sides: Sequence[str], most: int
) -> list[int]:
    """Column widths that break no word, nor a number from its unit; empty if there is no room.

    The remaining width goes to the columns with the most text.
    """
    least, whole = [], []
    for name, column, side in zip(head, columns, sides, strict=True):
        cells = [cell.plain for cell in column]
        words = [*name.split(), *(cells if side == "right" else " ".join(cells).split())]
        least.append(max(map(len, words), default=1))
        whole.append(max(map(len, (name, *cells))))
    room = most - 2 * (len(head) - 1) - sum(least)
    wanted = sum(whole) - sum(least)
    if room < 0:
        return []
    share = min(1.0, room / wanted) if wanted else 0.0
    return [low + int(share * (high - low)) for low, high in zip(least, whole, strict=True)]


def _inline(line: str, style: str = "") -> Text:
    """Text with Markdown's bold and code as styles."""
    from rich.text import Text

    text, end = Text(style=style), 0
    for mark in _INLINE.finditer(line):
        text.append(line[end : mark.start()])
        bold, code = mark["bold"], mark["cyan"]
        text.append_text(_inline(bold, "bold") if bold else Text(code, "cyan"))
        end = mark.end()
    return text.append(line[end:])
