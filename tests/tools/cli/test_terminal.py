"""The output of a command on a terminal and in a pipe."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest

from commfuse_npu.tools import terminal
from commfuse_npu.tools.terminal import table_row

SAID = (
    "## A heading",
    "`f(*args)`, f(**kwargs)",
    "| form | ms per step | why it cannot be launched |",
    "|---|---:|---|",
    table_row(["fused", "1,234.5 ms", "`--an-option` says, in many words, that it cannot"]),
    table_row(["**other**", "99.5 ms", "-"]),
    "",
    "| no table, one row |",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(width: int = 40, good: bool | None = None) -> str:
    """The output on a terminal of a given width."""
    out = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        with redirect_stdout(out), redirect_stderr(io.StringIO()), terminal.rendered("it"):
            terminal.print_verdict("It **helps**.", good)
            print(*SAID, sep="\n", end="")
    return out.getvalue()


def test_a_pipe_gets_markdown(capsys) -> None:
    with terminal.rendered("it"):
        terminal.tell("what is being computed")
        terminal.print_verdict("It **helps**.", True)
        print(*SAID, sep="\n", end="")
    assert capsys.readouterr() == ("\n".join(["It **helps**.", *SAID]), "")


def test_a_table_that_fits_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    plain = [line.replace("**other**", "other").replace("`", "") for line in SAID[1:]]
    assert shown(66).splitlines() == ["It helps.", "A heading", *plain]
    assert shown(67).splitlines()[3:7] == [
        "form   ms per step  why it cannot be launched",
        "-----  -----------  -----------------------------------------------",
        "fused   1,234.5 ms  --an-option says, in many words, that it cannot",
        "other      99.5 ms  -",
    ]


@pytest.mark.parametrize(("good", "style"), [(True, "1;32"), (False, "1;31"), (None, "1")])
def test_the_verdict_has_a_colour_that_can_be_refused(good, style, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert shown(good=good).startswith(f"\x1b[{style}mIt helps.\x1b[0m\n")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert "\x1b" not in shown(good=good)


def test_a_terminal_sees_what_is_computed_until_something_is_printed(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    both = Terminal()
    with redirect_stdout(both), redirect_stderr(both), terminal.rendered("it"):
        terminal.tell("a long " * 40)
        print("the end")
    assert re.fullmatch(
        r"\r\x1b\[Kit\r\x1b\[K(a long ){11}a \r\x1b\[Kthe end\n(\r\x1b\[K)+", both.getvalue()
    )
