"""Terminal output: tables that fit its width, colors, and a progress line.

Commands print Markdown.  On a terminal rich renders it, one line or table at a time; in a pipe, or
if rich is not installed, it is printed unchanged.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

__all__ = ["print_verdict", "rendered", "table_head", "table_row", "tell"]

_RULE = re.compile(r"\|[-:| ]+\|")
_INLINE = re.compile(r"\*\*(?P<bold>.+?)\*\*|`(?P<cyan>[^`]+)`")
_LEVELS = {
    "bold red": re.compile(r"^ *error\b|(?<=: )error(?=: )"),
    "yellow": re.compile(r"^ *warning\b|(?<=: )warning(?=: )"),
}
_VERDICTS = {True: "bold green", False: "bold red", None: "bold"}
_progress: Live | None = None


def table_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table_head(cells: Sequence[str], numbers: bool = True) -> str:
    """The header row and the rule; columns after the first are right-aligned if ``numbers``."""
    return f"{table_row(cells)}\n|---{('|---:' if numbers else '|---') * (len(cells) - 1)}|"


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
        if self._line:
            self.write("\n")
        self._end_table()

    def render(self, line: str, style: str = "") -> None:
        """Print a line outside of tables, wrapped between words with a hanging indent."""
        from rich.text import Text

        self._end_table()
        if line.startswith("    "):  # code, to be copied
            self._print(Text(line))
            return
        if heading := re.match("#+ ", line):
            line, style = line[heading.end() :], style or "bold"
        text = _inline(line, style)
        for level, pattern in _LEVELS.items():
            text.highlight_regex(pattern, level)
        begin = line[: len(line) - len(line.lstrip(" -"))]
        indent = " " * (len(begin) if "-" in begin else len(begin) + 2)
        breaks, width = [0], self._console.width
        for word in re.finditer(r"\S+", text.plain):
            if word.end() - breaks[-1] > width and text.plain[: word.start()].strip(" -"):
                breaks.append(word.start())
                width = self._console.width - len(indent)
        lines = text.divide(breaks[1:])
        for part in lines:
            part.rstrip()
        self._print(Text("\n" + indent).join(lines))

    def _print(self, text: Any) -> None:
        _hide_progress()
        self._console.print(text, soft_wrap=True)

    def _end_table(self) -> None:
        lines, self._table = self._table, []
        if len(lines) > 1 and _RULE.fullmatch(lines[1]) and (table := self._fitting(lines)):
            _hide_progress()
            self._console.print(table)
            return
        for line in lines:
            self._print(_inline(line))

    def _fitting(self, lines: Sequence[str]) -> Table | None:
        """A table in which no word is broken, nor a number from its unit, if there is room.

        The remaining width goes to the columns with the most text.
        """
        from rich import box
        from rich.table import Table

        head, rules, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
        texts = [list(map(_inline, row)) for row in rows]
        least, whole = [], []
        for name, rule, column in zip(head, rules, zip(*texts, strict=True), strict=True):
            cells = [cell.plain for cell in column]
            words = [*name.split(), *(cells if rule.endswith(":") else " ".join(cells).split())]
            least.append(max(map(len, words), default=1))
            whole.append(max(map(len, (name, *cells))))
        room = self._console.width - 2 * (len(head) - 1) - sum(least)
        if room < 0:
            return None
        share = min(1.0, room / max(1, sum(whole) - sum(least)))
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for name, rule, low, high in zip(head, rules, least, whole, strict=True):
            justify: Any = "right" if rule.endswith(":") else "left"
            table.add_column(name, justify=justify, width=low + int(share * (high - low)))
        for row in texts:
            table.add_row(*row)
        return table


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
