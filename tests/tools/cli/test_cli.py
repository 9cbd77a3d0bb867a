"""The command line: its output, and exit codes for each kind of result."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from commfuse_npu.plan.rules import RULES
from commfuse_npu.tools import cli
from tests.launchers.launching import ROOT, started
from tests.limits import LIMIT


def test_a_program_is_printed(capsys) -> None:
    for rule in RULES:
        assert cli.main(["plan", rule, "--ranks", "4", "--rank", "3", "--chunks", "2"]) == 0
        assert capsys.readouterr().out.startswith(f"{rule}, rank 3 of 4\n   0  ")
    words = ["plan", "gather_gemm", "--ranks", "4", "--rank", "1", "--chunks", "2"]
    assert cli.main([*words, "--rows", "8", "--columns", "16"]) == 0
    _, *code = capsys.readouterr().out.splitlines()
    posts = [line for line in code if " post step " in line]
    assert len(posts) == 2 * 3
    assert posts[0].endswith("lane 0: block 1 chunk 0 -> rank 2, block 0 chunk 0 <- rank 0")
    # The own block, then one chunk of all peers at a time.
    assert [line.split(maxsplit=1)[1] for line in code if "gemm" in line] == [
        "out[8:16] = gemm(shard[0:8], weight[0:16])",
        *(f"result {j}[0:12] = gemm(staged {j}[0:12], weight[0:16])" for j in range(2)),
    ]


def test_all_programs_are_proved(capsys) -> None:
    assert cli.main(["verify", "--max-ranks", "3", "--chunks", "1", "2", "--lanes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines[2:]] == ["| up", "|---", "| 2 ", "| 3 "]
    head = f"proved: all programs of 2 to 3 ranks: {len(RULES)} rules, chunks 1, 2, lanes 2; every "
    assert lines[0].startswith(head)


def test_a_broken_program_is_reported(monkeypatch, capsys) -> None:
    compiled = RULES["bucket_gather"]

    def broken(spec, *arguments):
        program = compiled(spec, *arguments)
        # The last rank posts nothing.
        return replace(program, code=()) if spec.rank == spec.size - 1 else program

    broken.cache_clear, broken.lines = compiled.cache_clear, compiled.lines
    monkeypatch.setitem(RULES, "bucket_gather", broken)
    assert cli.main(["verify", "--min-ranks", "3", "--max-ranks", "3", "--chunks", "1"]) == 1
    out = capsys.readouterr().out
    assert re.match(r"refuted: bucket_gather\(.\), 3 ranks, in batches, shifted, .* 1 chunks", out)
    assert "which rank 2 does not receive" in out


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
    words = [sys.executable, "-m", "commfuse_npu.tools.cli", "plan", "gather_gemm"]
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
        "assert cli.main(['doctor', '--config', config]) in (0, 1)\n"
        "assert cli.main(['plan', '--model', 'llama3_8b', '--npus', '8', '--tp', '4']) == 0\n"
    )
    done = started(sys.executable, "-I", "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Options of pretrain_gpt.py:" in done.stdout
