"""The command line: its output, and exit codes for each kind of result."""

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from commfuse_npu.plan.rules import RULES, BucketGather, Rule
from commfuse_npu.proof.cases import cases
from commfuse_npu.tools import cli, verify_command
from tests.launchers.launching import ROOT, started
from tests.limits import LIMIT
from tests.processes import interruptible


def test_all_programs_are_proved(monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify_command, "cases", lambda size: islice(cases(size), 0, None, 50))
    assert cli.main(["verify", "--max-ranks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sets = [case.programs() for size in (2, 3) for case in islice(cases(size), 0, None, 50)]
    assert lines[2].startswith(f"{len(sets)} sets of {sum(map(len, sets)):,} programs, ")
    head = f"proved: all programs of 2 to 3 ranks: {len(RULES)} rules, chunks 1, 2, 3, 4, "
    assert lines[0].startswith(f"{head}lanes 1, 2, 3, one per peer; every row is what it has to be")


def test_a_broken_program_is_reported(monkeypatch, capsys) -> None:
    def broken(self, spec):
        program = Rule.program(self, spec)
        # The last rank posts nothing.
        return replace(program, code=()) if spec.rank == spec.size - 1 else program

    monkeypatch.setattr(BucketGather, "program", broken)
    broken_rule = [case for case in cases(3) if isinstance(case.rule, BucketGather)]
    monkeypatch.setattr(verify_command, "cases", lambda size: broken_rule)
    assert cli.main(["verify", "--max-ranks", "3"]) == 1
    out = capsys.readouterr().out
    assert re.match(r"refuted: BucketGather\(rows=.\), 3 ranks, .* 1 chunks", out)
    assert "rank 2 expects nothing" in out


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)

    monkeypatch.setattr(cli, "import_module", missing)
    absent = "torch"
    assert cli.main(["measure"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("commfuse-npu measure: torch is not installed; install the torch of")
    absent = "commfuse_npu.nothing"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["measure"])


def test_a_reader_that_has_gone_ends_it_without_a_word() -> None:
    words = [sys.executable, "-m", "commfuse_npu.tools.cli", "doctor"]
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
        "from commfuse_npu.tools.config_file import find_config\n"
        "config = str(find_config('llama3_8b'))\n"
        "assert cli.main(['doctor']) in (0, 1)\n"
        "assert cli.main(['plan', config]) == 0\n"
        "assert cli.main(['plan', '--model', 'llama3_8b', '--npus', '8', '--tp', '4']) == 0\n"
    )
    done = started(sys.executable, "-I", "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Options of pretrain_gpt.py:" in done.stdout


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_quietly(tmp_path: Path, how: signal.Signals, code: int) -> None:
    script, pipe = tmp_path / "hangs.sh", tmp_path / "pipe"
    script.write_text(f"read word < {pipe}\n", "utf-8")
    os.mkfifo(pipe)
    words = [sys.executable, "-m", "commfuse_npu.tools.cli", "plan", str(script)]
    with interruptible(words, cwd=ROOT) as running, pipe.open("wb"):  # the script has opened it
        running.send_signal(how)
        assert running.communicate(timeout=LIMIT) == ("", "")
    assert running.returncode == code
