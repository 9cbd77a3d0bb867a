"""What a folder of a measurement takes, and what it refuses."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools.measure import folder as module
from commfuse_npu.tools.measure.command import lacking_backend
from commfuse_npu.tools.measure.folder import Deadline, Folder, FolderError

ABOUT = {"device": "cpu", "ranks": 2}


def test_steps_are_kept(tmp_path: Path) -> None:
    Folder(tmp_path / "new", ABOUT, resume=False).keep("links", {"times": []})
    again = Folder(tmp_path / "new", ABOUT, resume=True)
    assert again.kept("links") == {"times": []}
    assert again.kept("host") is None


def test_a_run_is_resumed_only_on_request(tmp_path: Path) -> None:
    Folder(tmp_path, ABOUT, resume=False)
    with pytest.raises(FolderError, match="holds a run; continue it with --resume"):
        Folder(tmp_path, ABOUT, resume=False)


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    Folder(tmp_path, ABOUT, resume=False)
    with pytest.raises(FolderError, match="ranks 2 there, 8 here; choose another"):
        Folder(tmp_path, {**ABOUT, "ranks": 8}, resume=True)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FolderError, match="is not empty; choose a new folder with --folder"):
        Folder(tmp_path, ABOUT, resume=False)
    with pytest.raises(FolderError, match="holds no run to resume; leave --resume out"):
        Folder(tmp_path / "nothere", ABOUT, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str, capsys: Any) -> None:
    folder = Folder(tmp_path, ABOUT, resume=False)
    (tmp_path / "links.json").write_text(text)
    assert folder.kept("links") is None
    said = capsys.readouterr().err
    assert "links.json" in said
    assert "remove it; links is measured again" in said
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(FolderError, match=r"run\.json .*; remove it"):
        Folder(tmp_path, ABOUT, resume=True)


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "run", ABOUT, resume=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("commfuse_npu.tools.measure.folder.write_json", full)
    with pytest.raises(FolderError, match=r"run/links\.json: No space left on device; free some"):
        folder.keep("links", {"times": []})


def test_without_torch_npu_there_is_nothing_to_go_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torch_npu is not installed" in lacking_backend("npu")
    assert lacking_backend("cpu") == ""


def test_what_begins_late_is_ended_a_tenth_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    until = Deadline(50)
    assert not until.over
    assert until.limit(600) == 600
    now[0] += 49 * 60
    assert not until.over
    assert until.limit(600) == pytest.approx(360)
    now[0] += 2 * 60
    assert until.over
    now[0] += 5 * 60
    assert until.limit(600) == 1
