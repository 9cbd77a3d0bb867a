"""The picture of a layer in four forms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commfuse_npu.tools.simulate.page import layer
from scripts.evidence.forms_picture import forms, main, step

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "forms.svg"


def test_the_picture_says_what_is_simulated(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    at, text = step(), PICTURE.read_text("utf-8")
    for row, (title, variant) in zip(layer(at, [*forms().items()]), forms().items(), strict=True):
        time = at.layer_time(variant)
        end = max(bit.end for bit in row.bits)
        # A pair by itself, which has no neighbours, is a little longer.
        assert end == pytest.approx(1e3 * time.seconds, rel=0.01)
        assert row.said.startswith(f"{title}: {end:.1f} ms, waiting ")
        assert f">{row.said}</text>" in text
        waits = sum(bit.end - bit.start for bit in row.bits if bit.kind == "waiting")
        # One rank of eight, of which the mean waits this long.
        assert waits == pytest.approx(1e3 * time.waiting, abs=10 * time.seconds)
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    assert [main([str(file)]) for file in files] == [0, 0]
    # A process counts the clips of its pictures.
    one, other = (re.sub(r"clip\d+", "clip", file.read_text("utf-8")) for file in files)
    assert one == other
