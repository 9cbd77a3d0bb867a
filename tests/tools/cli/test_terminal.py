"""What a terminal shows of what a command prints, and what a pipe gets."""

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
from commfuse_npu.tools.markdown import table_row
from tests.limits import LIMIT

pytest.importorskip("rich", reason="rich is not installed: the extra tools")

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FLAGS = "    --an-option 1 --another-option 2 --one-that-is-copied 3"
SAID = (
    "## A heading",
    "",
    f"- {'a few words ' * 9}",
    f"  {'ok ' * 40}",
    FLAGS,
    f"{'/a/path/that/has/no/spaces' * 3} is not cut",
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
    """What a terminal of a width gets."""
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


def test_a_pipe_gets_markdown_and_a_terminal_without_rich(shown, capsys, monkeypatch) -> None:
    with terminal.rendered("it"):
        terminal.tell("what is being computed")
        terminal.print_verdict("It **helps**.", True)
        print(*SAID, sep="\n", end="")
    said = "\n".join(["It **helps**.", *SAID])
    assert capsys.readouterr() == (said, "")
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    assert shown() == said


def test_lines_and_tables_fit(shown) -> None:
    lines = ESCAPE.sub("", shown()).splitlines()
    assert lines[:3] == ["It helps.", "A heading", ""]
    assert lines[-1] == "the end", "a last line without an end is shown, too"
    uncut = [line for line in lines if len(line) > 40]
    assert uncut == [FLAGS, f"{'/a/path/that/has/no/spaces' * 3}"]
    begin = [len(line) - len(line.lstrip()) for line in lines]
    assert begin[3:10] == [0, 2, 2, 2, 4, 4, 4]
    table = lines[lines.index("  is not cut") + 1 : lines.index("| no table, one row |") - 1]
    assert any(re.match(r"fused +1,234.5 ms ", line) for line in table), "a number is not broken"
    assert "plain" in table[-1], "without its stars"
    assert {"--an-option", "says,", "many", "that", "cannot"} <= {*" ".join(table).split()}
    # Where a table has no room there is a line for each row.
    narrow = ESCAPE.sub("", shown(width=20))
    assert "- form fused: ms per\n  step: 1,234.5 ms,\n  why it cannot be\n" in narrow


def test_colours_say_what_is_good_and_can_be_refused(shown, monkeypatch) -> None:
    for good, style in ((True, "1;32"), (False, "1;31"), (None, "1")):
        assert shown(good=good).startswith(f"\x1b[{style}mIt ")
    assert "\x1b[1;31merror" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*3\d", shown(good=True))
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(good=True)


def _before_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # What is started in the background of a script is deaf to it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_terminal_sees_what_is_computed_and_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    """With a real one: a script that hangs, and its reader who loses patience."""
    (tmp_path / "a.sh").write_text("exit\n", "utf-8")
    (tmp_path / "hangs.sh").write_text("while :; do :; done\n", "utf-8")
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    words = [sys.executable, "-m", "commfuse_npu.tools.cli", "plan", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        words, stdin=other, stdout=other, stderr=other, start_new_session=True, env=environment,
        preexec_fn=_before_a_terminal,
    ) as running:  # fmt: skip
        os.close(other)
        seen = b""
        with suppress(OSError):  # the other end has gone
            while select.select([own], [], [], LIMIT)[0] and (part := os.read(own, 1 << 16)):
                seen += part
                if b"1 of 2" in seen and b"\x03" not in seen:
                    os.write(own, b"\x03")
                    seen += b"\x03"
        assert running.wait(LIMIT) == 130
    os.close(own)
    assert b"Traceback" not in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l"), "its cursor is there again"
