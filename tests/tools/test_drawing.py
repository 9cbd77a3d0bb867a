"""Pictures as files, with made-up figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_npu.tools import drawing
from commfuse_npu.tools.drawing import Bit, Row, draw, gantt

BITS = (
    Bit("compute", 1.0, 3.0, "work"),
    Bit("compute", 0.0, 1.0, "waiting"),
    Bit("links", 0.0, 1.0, "transfer"),
)
LAYER = gantt("Layer", "ms", [Row("plain: 3 ms", ("compute", "links"), BITS)])


def test_pictures_as_files(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    draw(LAYER, "A <title>", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    draw(LAYER, "A <title>", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    labels = ("Layer", "plain: 3 ms", "compute", "links", "1.0", "transfer", "waiting")
    for label in ("A &lt;title&gt;", *labels):
        assert f">{label}</text>" in text, label


def test_a_picture_without_the_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drawing.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a picture needs vl-convert-python; pip install"):
        draw(LAYER, "None of them", tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
