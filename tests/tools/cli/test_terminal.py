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


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *said: str) -> list[str]:
    """The lines that a terminal of this width shows."""
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    with redirect_stdout(out), redirect_stderr(io.StringIO()), terminal.rendered():
        print(*said, sep="\n", end="")
    return out.getvalue().splitlines()


def test_a_table_that_fits_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_terminal(monkeypatch, 67, *SAID) == [
        "A heading",
        "f(*args), f(**kwargs)",
        "form   ms per step  why it cannot be launched",
        "-----  -----------  -----------------------------------------------",
        "fused   1,234.5 ms  --an-option says, in many words, that it cannot",
        "other      99.5 ms  -",
        "",
        "| no table, one row |",
    ]


def test_long_cells_of_a_wide_table_become_footnotes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_terminal(monkeypatch, 48, *SAID[2:6]) == [
        "form   ms per step  why it cannot be launched",
        "-----  -----------  -------------------------",
        "fused   1,234.5 ms  [1]",
        "other      99.5 ms  -",
        "[1] --an-option says, in many words, that it",
        "    cannot",
    ]


def test_lines_break_between_words_but_commands_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "    bash a_script.sh --an-option --another"
    assert on_terminal(monkeypatch, 24, "- one two three four five six", command) == [
        "- one two three four",
        "  five six",
        command,
    ]


def test_a_terminal_shows_progress_until_output_follows(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    both = Terminal()
    with redirect_stdout(both), redirect_stderr(both), terminal.rendered():
        terminal.tell("a long " * 40)
        print("the end")
    assert re.fullmatch(r"\r\x1b\[K(a long ){11}a \r\x1b\[Kthe end\n(\r\x1b\[K)+", both.getvalue())


def test_a_wide_table_without_long_cells_loses_its_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = (
        "| form | step | GiB |",
        "|---|---:|---:|",
        table_row(["overlap", "19.92 s (14.06 to 33.79)", "36.9"]),
    )
    assert on_terminal(monkeypatch, 40, *rows)[2] == "overlap  19.92 s (14.06 to 33.79)  36.9"
    assert on_terminal(monkeypatch, 30, *rows)[2] == "overlap  19.92 s  36.9"
