"""Tuning answers on disk, and the handling of invalid files."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu import tuning
from commfuse_npu.plan import Schedule

QUESTION: dict[str, Any] = {"machine": ["here"], "group": [0, 1], "problem": {"rows": 4}}
CHOICES = [None, Schedule(), Schedule(chunks=4, taper=1.5), Schedule(causal=True)]


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_an_answer_is_found_again(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "a folder, ünmade"
    assert tuning.remembered(folder, QUESTION, CHOICES) is None
    tuning.remember(folder, QUESTION, CHOICES[number], {"plain": 0.5})
    assert tuning.remembered(folder, QUESTION, CHOICES) == number
    assert tuning.remembered(folder, {**QUESTION, "group": [0, 2]}, CHOICES) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"], "nothing half-written is left"


def _changed(**changes: Any) -> bytes:
    entry = {"format": 1, "question": QUESTION, "answer": None, "seconds": {}}
    return json.dumps({**entry, **changes}).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b"[1, 2]", "not of format 1"),
        (_changed(format=2), "not of format 1"),
        (_changed(question={**QUESTION, "machine": ["there"]}), "another machine"),
        (_changed(answer={"shape": "shifted", "lanes": 99}), "none of the 4 choices"),
        (json.dumps({"format": 1, "question": QUESTION}).encode(), "none of the 4 choices"),
    ],
)
def test_anything_else_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, why: str
) -> None:
    tuning.remember(tmp_path, QUESTION, None, {})
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert tuning.remembered(tmp_path, QUESTION, CHOICES) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(path) in line
    assert why in line
    tuning.remember(tmp_path, QUESTION, CHOICES[1], {})
    assert tuning.remembered(tmp_path, QUESTION, CHOICES) == 1


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        tuning.remember(tmp_path / "file" / "folder", QUESTION, None, {})
    assert "is not remembered" in caplog.text


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "somewhere")
    assert tuning.default_folder() == Path(os.sep + "somewhere") / "commfuse_npu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning.default_folder() == Path.home() / ".cache" / "commfuse_npu"
