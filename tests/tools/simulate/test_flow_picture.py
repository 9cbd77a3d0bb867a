"""The picture of a layer in four forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evidence.flow_picture import forms, lanes, main, step

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "flow.svg"


def test_the_picture_says_what_is_simulated(tmp_path: Path) -> None:
    at, text = step(), PICTURE.read_text("utf-8")
    for title, variant in forms().items():
        time, parts = at.layer_time(variant), lanes(at, variant)
        assert sum(one.seconds for one in parts) == pytest.approx(time.seconds, rel=1e-3)
        waits = sum(stop - start for one in parts for start, stop in one.waiting)
        # One rank of eight, of which the mean waits this long.
        assert waits == pytest.approx(time.waiting, abs=0.01 * time.seconds)
        assert f"{title}: {1e3 * sum(one.seconds for one in parts):.2f} ms" in text
        for one in parts:
            drawn = sum(b - a for runs in (one.gemms, one.other, one.waiting) for a, b in runs)
            assert drawn == pytest.approx(one.seconds)
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        assert main([str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
