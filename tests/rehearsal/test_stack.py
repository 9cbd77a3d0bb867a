"""Finding the checkouts, and saying what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError
from mindspeed_patches.rehearsal.__main__ import main
from mindspeed_patches.rehearsal.stack import find_stack


def checkout(folder: Path, *files: str, setup: str = "") -> str:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    if setup:
        (folder / "setup.py").write_text(setup, "utf-8")
    return str(folder)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    megatron = checkout(tmp_path / "mg", "megatron/training/training.py")
    info = tmp_path / "mg/megatron/core/package_info.py"
    info.parent.mkdir()
    info.write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\n", "utf-8")
    return {
        "MINDSPEED_HOME": checkout(tmp_path / "ms", "mindspeed/patch_utils.py", ".git/HEAD"),
        "MINDSPEED_LLM_HOME": checkout(
            tmp_path / "llm",
            "mindspeed_llm/training/training.py",
            "mindspeed_llm/tasks/megatron_adaptor_v2.py",
            setup="__version__ = '2.2.0'\n",
        ),
        "MEGATRON_HOME": megatron,
    }


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        find_stack(None, None, None, {})
    for part in (
        "--mindspeed DIR or MINDSPEED_HOME=DIR",
        "--mindspeed-llm DIR or MINDSPEED_LLM_HOME=DIR",
        "--megatron DIR or MEGATRON_HOME=DIR",
        "core_v0.12.1",
        "<version>_core_r0.12.1",
    ):
        assert part in str(raised.value)


def test_options_go_before_variables(folders: dict[str, str], tmp_path: Path) -> None:
    other = checkout(tmp_path / "other", "mindspeed/patch_utils.py")
    stack = find_stack(other, None, None, folders)
    assert stack.mindspeed == Path(other)
    assert stack.llm == Path(folders["MINDSPEED_LLM_HOME"])
    Path(folders["MINDSPEED_HOME"], ".git/HEAD").write_text("ref: refs/heads/master\n", "utf-8")
    versions = find_stack(None, None, None, folders).versions()
    assert versions["MindSpeed-LLM"].startswith("version 2.2.0")
    assert versions["MindSpeed"].startswith("git master")
    assert versions["Megatron-LM"].startswith("core 0.12.1")


def test_a_folder_that_is_something_else(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"MEGATRON_HOME is .* no checkout of Megatron-LM"):
        find_stack(None, None, None, {**folders, "MEGATRON_HOME": str(tmp_path)})


def test_megatron_copied_into_mindspeed_llm(folders: dict[str, str]) -> None:
    llm = Path(folders["MINDSPEED_LLM_HOME"])
    checkout(llm, "megatron/training/training.py")
    del folders["MEGATRON_HOME"]
    assert find_stack(None, None, None, folders).megatron == llm


def test_an_old_mindspeed_llm_is_refused(folders: dict[str, str]) -> None:
    Path(folders["MINDSPEED_LLM_HOME"], "mindspeed_llm/tasks/megatron_adaptor_v2.py").unlink()
    with pytest.raises(UsageError, match=r"2\.1\.0 or older"):
        find_stack(None, None, None, folders)


def test_the_command_says_it_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MINDSPEED_HOME", "MINDSPEED_LLM_HOME", "MEGATRON_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--", "pretrain_gpt.py", "--bf16"]) == 2
    assert "MindSpeed-LLM is missing" in capsys.readouterr().err


def test_more_processes_than_allowed(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, folder in folders.items():
        monkeypatch.setenv(name, folder)
    checkout(Path(folders["MINDSPEED_LLM_HOME"]), "pretrain_gpt.py")
    launch = ["pretrain_gpt.py", "--tensor-model-parallel-size", "16"]
    assert main(["--processes", "4", "--", *launch]) == 2
    message = capsys.readouterr().err
    assert "wants 16 processes, the limit is 4" in message
    assert "--rehearse-scale" in message
