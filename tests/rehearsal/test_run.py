"""A run that fails or hangs leaves a message and no process; the checkouts are found."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from commfuse_npu.tools.launch_script import UsageError
from mindspeed_patches.rehearsal import run as runs
from mindspeed_patches.rehearsal.__main__ import main
from mindspeed_patches.rehearsal.run import (
    RunFailedError,
    find_stack,
    train,
    worker_environment,
)


@pytest.mark.parametrize(
    ("code", "timeout", "said"),
    [
        (
            "import os\nraise ImportError(os.environ['SET'])",
            120,
            "0 of 1 ranks(.|\n)*ImportError: 1",
        ),
        ("import time\ntime.sleep(600)", 0.5, r"reference run did not end within 0 s \(--timeout"),
    ],
)
def test_a_run_that_fails_is_quoted(code: str, timeout: float, said: str, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(code, "utf-8")
    (tmp_path / "script.py").touch()
    with pytest.raises(RunFailedError, match=said):
        train(
            "reference",
            ["script.py"],
            tmp_path / "records",
            processes=1,
            folder=tmp_path,
            environment=worker_environment([tmp_path], {"SET": "1"}, tmp_path / "tools"),
            timeout=timeout,
        )


def test_what_is_quoted_is_the_first_rank_that_failed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "[rank1]: Traceback (most recent call last):\n"
        "[rank0]: Traceback (most recent call last):\n"
        "[rank1]: NotImplementedError: Could not run 'npu::npu_some_op' with the 'CPU' backend\n"
        "[rank0]: RuntimeError: the other one has gone\n"
        "[rank1]: CPU: registered at somewhere.cpp:1 [kernel]\n"
        "  frame #0: c10::Error\n"
        "Traceback (most recent call last):\n"
        '  File "/x/torch/distributed/run.py", line 1\n',
        "utf-8",
    )
    first, error, hint = runs._tail(log).splitlines()
    assert first.strip() == "Traceback (most recent call last):"
    assert "npu_some_op" in error
    assert "npu::npu_some_op has no CPU kernel" in hint


# ------------------------------------------------------------------ the checkouts

ADAPTOR = "mindspeed_llm/tasks/megatron_adaptor_v2.py"
HOMES = ("MINDSPEED_LLM_HOME", "MINDSPEED_HOME", "MEGATRON_HOME")


def checkout(folder: Path, *files: str) -> str:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return str(folder)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {
        "MINDSPEED_HOME": checkout(tmp_path / "ms", "mindspeed/patch_utils.py"),
        "MINDSPEED_LLM_HOME": checkout(tmp_path / "llm", ADAPTOR, "pretrain_gpt.py"),
        "MEGATRON_HOME": checkout(tmp_path / "mg", "megatron/training/training.py"),
    }


def test_the_checkouts_are_those_that_the_environment_names(folders) -> None:
    llm, mindspeed, megatron = (Path(folders[name]) for name in HOMES)
    assert find_stack(folders) == [llm, mindspeed, megatron]
    with pytest.raises(UsageError, match=r"^MEGATRON_HOME is .*llm; give a checkout with megatron"):
        find_stack({**folders, "MEGATRON_HOME": str(llm)})
    (llm / ADAPTOR).unlink()
    with pytest.raises(
        UsageError, match=f"with {ADAPTOR}: .*\nThese belong together: MindSpeed-LLM"
    ):
        find_stack(folders)


def test_what_the_command_refuses(folders, monkeypatch, capsys) -> None:
    for name in HOMES:
        monkeypatch.setenv(name, "")
    assert main(["--", "pretrain_gpt.py", "--bf16"]) == 2
    message = capsys.readouterr().err
    for hint in (*(f"{name}=DIR" for name in HOMES), "core_v0.12.1", "_core_r0.12.1"):
        assert hint in message
    for name in HOMES:
        monkeypatch.setenv(name, folders[name])
    words = "--processes 4 -- pretrain_gpt.py --tensor-model-parallel-size 16"
    assert main(words.split()) == 2
    message = capsys.readouterr().err
    assert re.search("wants 16 processes, the limit is 4(.|\n)*--rehearse-scale", message)
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError))
    assert main(["--", "pretrain_gpt.py"]) == 2
    message = capsys.readouterr().err
    assert re.search("finds neither CANN .*; start with bash scripts/rehearse_on_cpu", message)
    with pytest.raises(SystemExit, match="2"):
        main(["--iterations", "2"])
    assert "no launch given; put it after --" in capsys.readouterr().err
