"""A layer as lanes, without holes or overlaps, and the picture in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commfuse_npu.tools.report.charts import Row
from commfuse_npu.tools.simulate.lanes import lanes
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.variants import Variant
from scripts.evidence.forms_picture import forms, main, step

PICTURE = (Path(__file__).resolve().parents[3] / "docs" / "forms.svg").read_text("utf-8")


def filled(step: Step, title: str, variant: Variant) -> Row:
    """Its lanes, of which work and waiting fill that of the compute engine."""
    parts = step.parts(variant)
    row = lanes(title, parts)
    end, at = 1e3 * sum(one.seconds for _, one in parts), 0.0
    for bit in sorted((b for b in row.bits if b.lane == "compute"), key=lambda bit: bit.start):
        assert bit.start == pytest.approx(at, abs=1e-5), bit
        at = bit.end
    assert at == pytest.approx(end)
    waited = sum(bit.end - bit.start for bit in row.bits if bit.kind == "waiting")
    assert row.said == f"{title}: {end:.1f} ms, waiting {waited:.1f} ms"
    assert {bit.kind for bit in row.bits if bit.lane == "links"} == {"transfer"}
    time = step.layer_time(variant)
    # A pair by itself, which has no neighbours, is a little longer.
    assert end == pytest.approx(1e3 * time.seconds, rel=0.01)
    # One rank of eight, of which the mean waits this long.
    assert waited == pytest.approx(1e3 * time.waiting, abs=10 * time.seconds)
    return row


def test_the_picture_says_what_is_simulated(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    at = step()
    rows = [filled(at, *item) for item in forms().items()]
    assert all(f">{row.said}</text>" in PICTURE for row in rows)
    # Whatever goes to several peers at once is one bit.
    sent = {bit.name for bit in rows[2].bits if bit.lane == "links"}
    assert sum(re.match(r"forward: fc1 chunk 0$", name) is not None for name in sent) == 1
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    assert [main([str(file)]) for file in files] == [0, 0]
    # A process counts the clips of its pictures.
    one, other = (re.sub(r"clip\d+", "clip", file.read_text("utf-8")) for file in files)
    assert one == other
