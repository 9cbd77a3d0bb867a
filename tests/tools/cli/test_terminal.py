"""The output of a command on a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest

from commfuse_npu.tools import terminal
from commfuse_npu.tools.terminal import table_row
from tests.limits import LIMIT

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
    table_row(["**plain**", "99.5 ms", "-"]),
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
    assert "| plain | 99.5 ms | - |" in lines
    lines = ESCAPE.sub("", shown(width=90)).splitlines()
    at = lines.index(f"-----  -----------  {47 * '-'}")
    assert lines[at - 1] == "form   ms per step  why it cannot be launched"
    assert lines[at + 1].startswith("fused   1,234.5 ms  --an-option says, in many words")
    assert lines[at + 2 : at + 5] == ["plain      99.5 ms  -", "", "| no table, one row |"]


def test_colours_say_what_is_good_and_can_be_refused(shown, monkeypatch) -> None:
    for good, style in ((True, "1;32"), (False, "1;31"), (None, "1")):
        assert shown(good=good).startswith(f"\x1b[{style}mIt ")
    assert "a plan: \x1b[31merror\x1b[39m: it is red" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(good=True)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(good=True)


def _before_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Background jobs of a script ignore SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_terminal_sees_what_is_computed_and_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    """On a pseudo-terminal: a script hangs, and the user presses Ctrl-C."""
    script = tmp_path / "hangs.sh"
    script.write_text("while :; do :; done\n", "utf-8")
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    words = [sys.executable, "-m", "commfuse_npu.tools.cli", "plan", str(script)]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        words, stdin=writer, stdout=writer, stderr=writer, start_new_session=True, env=environment,
        preexec_fn=_before_a_terminal,
    ) as running:  # fmt: skip
        os.close(writer)
        output = b""
        with suppress(OSError):  # the other end is closed
            while select.select([reader], [], [], LIMIT)[0] and (part := os.read(reader, 1 << 16)):
                output += part
                if b"reading what" in output and b"\x03" not in output:
                    os.write(reader, b"\x03")
                    output += b"\x03"
        assert running.wait(LIMIT) == 130
    os.close(reader)
    assert b"Traceback" not in output
    assert b"\r\x1b[Kreading what" in output
    assert output.endswith(b"\r\x1b[K"), "its last line is empty again"
