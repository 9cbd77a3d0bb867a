"""Finding the checkouts, and saying what is missing."""

from __future__ import annotations

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


def test_a_folder_that_is_something_else(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"MEGATRON_HOME is .* no checkout of Megatron-LM"):
        find_stack({}, {**folders, "MEGATRON_HOME": str(tmp_path)})
    with pytest.raises(UsageError, match=r"--megatron is .* it has no megatron/training"):
        find_stack({"megatron": str(tmp_path)}, folders)


def test_megatron_copied_into_mindspeed_llm(folders: dict[str, str]) -> None:
    llm = checkout(Path(folders["MINDSPEED_LLM_HOME"]), "megatron/training/training.py")
    del folders["MEGATRON_HOME"]
    assert find_stack({}, folders).megatron == Path(llm)


def test_packages_that_can_be_imported(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folders.pop("MINDSPEED_HOME"))
    assert find_stack({}, folders).mindspeed.name == "ms"


def test_an_old_mindspeed_llm_is_refused(folders: dict[str, str]) -> None:
    Path(folders["MINDSPEED_LLM_HOME"], ADAPTOR).unlink()
    with pytest.raises(UsageError, match=r"2\.1\.0 or older"):
        find_stack({}, folders)


def test_what_is_missing_is_named_with_where_to_get_it(monkeypatch, capsys) -> None:
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


def test_too_many_processes_are_refused_with_a_way_out(folders, monkeypatch, capsys) -> None:
    for name in HOMES:
        monkeypatch.setenv(name, folders[name])
    words = "--processes 4 -- pretrain_gpt.py --tensor-model-parallel-size 16"
    assert main(words.split()) == 2
    message = capsys.readouterr().err
    assert "wants 16 processes, the limit is 4" in message
    assert "--rehearse-scale" in message


def test_without_a_launch_the_command_says_where_it_goes(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--iterations", "2"])
    assert "no launch given; put it after --" in capsys.readouterr().err
