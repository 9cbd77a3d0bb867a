"""The command line: its output, and exit codes for each kind of result."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from commfuse_npu.plan.rules import RULES
from commfuse_npu.proof.cases import cases
from commfuse_npu.tools import cli, terminal, verify_command
from commfuse_npu.tools.markdown import table_row
from tests.launchers.launching import ROOT, started
from tests.limits import LIMIT
from tests.processes import interruptible


def test_all_programs_are_proved(monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify_command, "cases", lambda size: islice(cases(size), 0, None, 50))
    assert cli.main(["verify", "--max-ranks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sets = [case.programs() for size in (2, 3) for case in islice(cases(size), 0, None, 50)]
    assert lines[2].startswith(f"{len(sets)} sets of {sum(map(len, sets)):,} programs with ")
    head = f"proved: all programs of 2 to 3 ranks: {len(RULES)} rules, chunks 1, 2, 3, 4, "
    assert lines[0].startswith(f"{head}lanes 1, 2, 3, one per peer; every row is what it has to be")


def test_a_broken_program_is_reported(monkeypatch, capsys) -> None:
    compiled = RULES["bucket_gather"]

    def broken(spec, *arguments):
        program = compiled(spec, *arguments)
        # The last rank posts nothing.
        return replace(program, code=()) if spec.rank == spec.size - 1 else program

    broken.cache_clear, broken.lines = compiled.cache_clear, compiled.lines
    monkeypatch.setitem(RULES, "bucket_gather", broken)
    broken_rule = [case for case in cases(3) if case.rule == "bucket_gather"]
    monkeypatch.setattr(verify_command, "cases", lambda size: broken_rule)
    assert cli.main(["verify", "--max-ranks", "3"]) == 1
    out = capsys.readouterr().out
    assert re.match(r"refuted: bucket_gather\(.\), 3 ranks, in batches, shifted, .* 1 chunks", out)
    assert "rank 2 expects nothing" in out


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)

    monkeypatch.setattr(cli, "import_module", missing)
    absent = "torch"
    assert cli.main(["bench"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("commfuse-npu bench: torch is not installed; install the torch of")
    absent = "commfuse_npu.nothing"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["bench"])


def test_a_reader_that_has_gone_ends_it_without_a_word() -> None:
    words = [sys.executable, "-m", "commfuse_npu.tools.cli", "verify", "--max-ranks", "2"]
    reader, pipe = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, timeout=LIMIT)
    os.close(pipe)
    assert (done.stderr, done.returncode) == (b"", -signal.SIGPIPE)


PARTS = ("setup.py", "pyproject.toml", "README.md", "commfuse_npu", "mindspeed_patches", "configs")


@pytest.mark.long
def test_the_wheel_plans_without_torch(tmp_path: Path) -> None:
    """The wheel contains the files that its commands read."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", installed]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); sys.modules['torch'] = None\n"
        "from commfuse_npu.tools import cli\n"
        "from commfuse_npu.config_file import find_config\n"
        "config = str(find_config('llama3_8b'))\n"
        "assert cli.main(['doctor']) in (0, 1)\n"
        "assert cli.main(['plan', config]) == 0\n"
        "assert cli.main(['plan', '--model', 'llama3_8b', '--npus', '8', '--tp', '4']) == 0\n"
    )
    done = started(sys.executable, "-I", "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Options of pretrain_gpt.py:" in done.stdout


# ------------------------------------------------------------------- on a terminal and in a pipe

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
    """A function that returns the output on a terminal of a given width."""
    pytest.importorskip("rich", reason="rich is not installed: the extra tools")
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
    expected = "\n".join(["It **helps**.", *SAID])
    assert capsys.readouterr() == (expected, "")
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    assert shown() == expected


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
    # If a table does not fit, each row becomes a list item.
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


def test_a_terminal_sees_what_is_computed_and_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    """A script hangs, and the user presses Ctrl-C."""
    pytest.importorskip("rich", reason="rich is not installed: the extra tools")
    script = tmp_path / "hangs.sh"
    script.write_text("while :; do :; done\n", "utf-8")
    reader, writer = pty.openpty()
    words = [sys.executable, "-m", "commfuse_npu.tools.cli", "plan", str(script)]
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": path}
    with interruptible(words, env=environment, stdout=writer, stderr=writer) as running:
        os.close(writer)
        output, presses = b"", [signal.SIGINT]
        with suppress(OSError):  # the other end is closed
            while select.select([reader], [], [], LIMIT)[0] and (part := os.read(reader, 1 << 16)):
                output += part
                if b"reading what" in output and presses:
                    running.send_signal(presses.pop())
        assert running.wait(LIMIT) == 130
    os.close(reader)
    assert b"Traceback" not in output
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l"), "its cursor is there again"
