"""The output of a command on a terminal and in a pipe."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

import pytest

from commfuse_npu.tools import terminal
from commfuse_npu.tools.terminal import table_row

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FLAGS = "    --an-option 1 --another-option 2 --one-that-is-copied 3"
PATH = "/a/path/that/has/no/spaces" * 3
SAID = (
    "## A heading",
    "",
    f"- {'a few words ' * 9}",
    f"  {'ok ' * 40}",
    FLAGS,
    f"{PATH} is not cut",
    "| form | ms per step | why it cannot be launched |",
    "|---|---:|---|",
    table_row(["fused", "1,234.5 ms", "`--an-option` says, in many words, that it cannot"]),
    table_row(["**昇腾**", "99.5 ms", "-"]),
    "",
    "| no table, one row |",
    "a plan: error: it is red",
    "the end",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that returns the output on a terminal of a given width."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def show(width: int = 40, good: bool | None = None) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        out = Terminal()
        with redirect_stdout(out), redirect_stderr(io.StringIO()), terminal.rendered("it"):
            terminal.print_verdict("It **helps**.", good)
            print(*SAID, sep="\n", end="")
        return out.getvalue()

    return show


def test_a_pipe_gets_markdown(capsys) -> None:
    with terminal.rendered("it"):
        terminal.tell("what is being computed")
        terminal.print_verdict("It **helps**.", True)
        print(*SAID, sep="\n", end="")
    assert capsys.readouterr() == ("\n".join(["It **helps**.", *SAID]), "")


def test_lines_and_tables_fit(shown) -> None:
    lines = ESCAPE.sub("", shown()).splitlines()
    assert lines[:3] == ["It helps.", "A heading", ""]
    assert lines[-1] == "the end", "a last line without an end is shown, too"
    assert [line for line in lines[:12] if len(line) > 40] == [FLAGS, PATH]
    begin = [len(line) - len(line.lstrip()) for line in lines]
    assert begin[3:10] == [0, 2, 2, 2, 4, 4, 4]
    # A table that does not fit stays Markdown.
    assert "| 昇腾 | 99.5 ms | - |" in lines
    lines = ESCAPE.sub("", shown(width=90)).splitlines()
    at = lines.index(f"-----  -----------  {47 * '-'}")
    assert lines[at - 1] == "form   ms per step  why it cannot be launched"
    assert lines[at + 1].startswith("fused   1,234.5 ms  --an-option says, in many words")
    assert lines[at + 2 : at + 5] == ["昇腾       99.5 ms  -", "", "| no table, one row |"]


def test_colours_say_what_is_good_and_can_be_refused(shown, monkeypatch) -> None:
    for good, style in ((True, "1;32"), (False, "1;31"), (None, "1")):
        assert shown(good=good).startswith(f"\x1b[{style}mIt ")
    assert "a plan: \x1b[31merror\x1b[39m: it is red" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(good=True)
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" in shown(good=True)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(good=True)


def test_a_terminal_sees_what_is_computed_until_something_is_printed(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    both = Terminal()
    with redirect_stdout(both), redirect_stderr(both), terminal.rendered("it"):
        terminal.tell("a long " * 40)
        print("the end")
    assert re.fullmatch(
        r"\r\x1b\[Kit\r\x1b\[K(a long ){11}a \r\x1b\[Kthe end\n(\r\x1b\[K)+", both.getvalue()
    )
