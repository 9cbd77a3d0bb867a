"""A run that fails or hangs leaves a message; the checkouts are found."""

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from commfuse_npu.tools.launch_script import UsageError
from mindspeed_patches.rehearsal.__main__ import main
from mindspeed_patches.rehearsal.run import RunFailedError, find_stack, train, worker_environment

LOG = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]: NotImplementedError: Could not run 'npu::npu_some_op' with the 'CPU' backend
[rank0]: RuntimeError: the other one has gone
[rank1]: CPU: registered at somewhere.cpp:1 [kernel]
  frame #0: c10::Error
Traceback (most recent call last):
  File "/x/torch/distributed/run.py", line 1
"""
QUOTED = """ ranks reached its end (--output DIR keeps the whole log):
    Traceback (most recent call last):
    NotImplementedError: Could not run 'npu::npu_some_op' with the 'CPU' backend
    npu::npu_some_op has no CPU kernel: """


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"return_value": 1}, f"the commfuse run failed with exit code 1, and 0 of 1{QUOTED}"),
        ({"return_value": 0}, "failed with exit code 0, and 0 of 1 ranks"),
        ({"side_effect": TimeoutError("took 1 s")}, "commfuse run took 1 s (--timeout):\n    Tr"),
    ],
)
def test_a_run_that_fails_is_quoted_by_its_first_rank(end, said, tmp_path, monkeypatch) -> None:
    environment = worker_environment([tmp_path], {"SET": "1", "PYTHONPATH": "x"}, tmp_path / "t")
    assert environment["SET"] == "1"
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert (paths[0], paths[-1]) == (str(tmp_path), "x")
    records = tmp_path / "records"

    def run(words: list[str], *, log: Path, **given: Any) -> int:
        assert words[-3:] == [str(records), "commfuse", "x.py"]
        assert given == {"folder": tmp_path, "environment": environment, "seconds": 1}
        log.write_text(LOG, "utf-8")
        return Mock(**end)()

    monkeypatch.setattr("mindspeed_patches.rehearsal.run.run_bounded", run)
    where = {"folder": tmp_path, "environment": environment}
    with pytest.raises(RunFailedError, match=re.escape(said)):
        train("commfuse", ["x.py"], records, processes=1, timeout=1, **where)


# ------------------------------------------------------------------ the checkouts

ADAPTOR = "mindspeed_llm/tasks/megatron_adaptor_v2.py"
HOMES = ("MINDSPEED_LLM_HOME", "MINDSPEED_HOME", "MEGATRON_HOME")


FILES = ADAPTOR, "mindspeed/patch_utils.py", "megatron/training/training.py"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    for name, file in zip(HOMES, FILES, strict=True):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).touch()
    (tmp_path / HOMES[0] / "pretrain_gpt.py").touch()
    return {name: str(tmp_path / name) for name in HOMES}


def test_the_checkouts_are_those_that_the_environment_names(folders) -> None:
    llm, mindspeed, megatron = (Path(folders[name]) for name in HOMES)
    assert find_stack(folders) == [llm, mindspeed, megatron]
    with pytest.raises(UsageError, match=r"^MEGATRON_HOME is .*LLM_HOME; give a checkout with m"):
        find_stack({**folders, "MEGATRON_HOME": str(llm)})
    assert find_stack({**folders, HOMES[0]: ""}) == [mindspeed, megatron]
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
    versions = "core_v0.12.1", "_core_r0.12.1", "without MINDSPEED_LLM_HOME"
    for hint in (*(f"{name}=DIR" for name in HOMES[1:]), *versions):
        assert hint in message
    for name in HOMES:
        monkeypatch.setenv(name, folders[name])
    words = "--processes 4 -- pretrain_gpt.py --tensor-model-parallel-size 16"
    assert main(words.split()) == 2
    message = capsys.readouterr().err
    assert re.search("wants 16 processes, the limit is 4(.|\n)*--rehearse-scale", message)
    with pytest.raises(SystemExit, match="2"):
        main(["--iterations", "2"])
    assert "no launch given; put it after --" in capsys.readouterr().err
