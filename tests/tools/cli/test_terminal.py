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


def test_a_pipe_gets_markdown(capsys) -> None:
    with terminal.rendered():
        terminal.tell("what is being computed")
        print(*SAID, sep="\n", end="")
    assert capsys.readouterr() == ("\n".join(SAID), "")


@pytest.mark.parametrize("width", [66, 67])
def test_a_table_that_fits_is_aligned(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    with redirect_stdout(out), redirect_stderr(io.StringIO()), terminal.rendered():
        print(*SAID, sep="\n", end="")
    said = "\n".join(["A heading", *SAID[1:]])
    lines = said.replace("**other**", "other").replace("`", "").splitlines()
    if width == 67:
        lines[2:6] = [
            "form   ms per step  why it cannot be launched",
            "-----  -----------  -----------------------------------------------",
            "fused   1,234.5 ms  --an-option says, in many words, that it cannot",
            "other      99.5 ms  -",
        ]
    assert out.getvalue().splitlines() == lines


def test_a_terminal_shows_progress_until_output_follows(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    both = Terminal()
    with redirect_stdout(both), redirect_stderr(both), terminal.rendered():
        terminal.tell("a long " * 40)
        print("the end")
    assert re.fullmatch(r"\r\x1b\[K(a long ){11}a \r\x1b\[Kthe end\n(\r\x1b\[K)+", both.getvalue())
