"""Finding the checkouts, and saying what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError
from mindspeed_patches.rehearsal.__main__ import main
from mindspeed_patches.rehearsal.stack import find_stack

ADAPTOR = "mindspeed_llm/tasks/megatron_adaptor_v2.py"
HOMES = ("MINDSPEED_LLM_HOME", "MINDSPEED_HOME", "MEGATRON_HOME")


def checkout(folder: Path, *files: str) -> str:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return str(folder)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    training = "mindspeed_llm/training/training.py"
    return {
        "MINDSPEED_HOME": checkout(tmp_path / "ms", "mindspeed/patch_utils.py"),
        "MINDSPEED_LLM_HOME": checkout(tmp_path / "llm", training, ADAPTOR, "pretrain_gpt.py"),
        "MEGATRON_HOME": checkout(tmp_path / "mg", "megatron/training/training.py"),
    }


def test_options_go_before_variables(folders: dict[str, str], tmp_path: Path) -> None:
    other = checkout(tmp_path / "other", "mindspeed/patch_utils.py")
    stack = find_stack({"mindspeed": other, "llm": None}, folders)
    assert stack.mindspeed == Path(other)
    assert stack.llm == Path(folders["MINDSPEED_LLM_HOME"])
    assert stack.megatron == Path(folders["MEGATRON_HOME"])


def test_folders_that_are_something_else_or_old_are_refused(folders, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"MEGATRON_HOME is .* no checkout of Megatron-LM"):
        find_stack({}, {**folders, "MEGATRON_HOME": str(tmp_path)})
    with pytest.raises(UsageError, match=r"--megatron is .* it has no megatron/training"):
        find_stack({"megatron": str(tmp_path)}, folders)
    Path(folders["MINDSPEED_LLM_HOME"], ADAPTOR).unlink()
    with pytest.raises(UsageError, match=r"2\.1\.0 or older"):
        find_stack({}, folders)


def test_megatron_in_mindspeed_llm_and_packages_that_can_be_imported(folders, monkeypatch) -> None:
    llm = checkout(Path(folders["MINDSPEED_LLM_HOME"]), "megatron/training/training.py")
    del folders["MEGATRON_HOME"]
    monkeypatch.syspath_prepend(folders.pop("MINDSPEED_HOME"))
    found = find_stack({}, folders)
    assert (found.megatron, found.mindspeed.name) == (Path(llm), "ms")


def test_what_the_command_refuses(folders, monkeypatch, capsys) -> None:
    for name in HOMES:
        monkeypatch.setenv(name, "")
    assert main(["--", "pretrain_gpt.py", "--bf16"]) == 2
    message = capsys.readouterr().err
    for said in (
        "MindSpeed-LLM is missing: give its checkout with --mindspeed-llm DIR or "
        "MINDSPEED_LLM_HOME=DIR",
        *("--mindspeed DIR or MINDSPEED_HOME=DIR", "--megatron DIR or MEGATRON_HOME=DIR"),
        *("core_v0.12.1", "<version>_core_r0.12.1"),
    ):
        assert said in message
    for name in HOMES:
        monkeypatch.setenv(name, folders[name])
    words = "--processes 4 -- pretrain_gpt.py --tensor-model-parallel-size 16"
    assert main(words.split()) == 2
    message = capsys.readouterr().err
    assert re.search("wants 16 processes, the limit is 4(.|\n)*--rehearse-scale", message)
    with pytest.raises(SystemExit, match="2"):
        main(["--iterations", "2"])
    assert "no launch given; put it after --" in capsys.readouterr().err
