"""The page and its pictures, with made-up figures."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from commfuse_npu.tools import option_types
from commfuse_npu.tools.report import drawing
from commfuse_npu.tools.report.charts import (
    Bar,
    Bit,
    Line,
    Row,
    Table,
    bars,
    gantt,
    heat,
    lines,
    stacks,
)
from commfuse_npu.tools.report.drawing import draw
from commfuse_npu.tools.report.page import Section, environment, write_page
from tests.tools.report.pages import read

BITS = (
    Bit("compute", "qkv GEMM", 1.0, 3.0, "work"),
    Bit("compute", "waiting", 0.0, 1.0, "waiting"),
    Bit("links", "qkv all-gather", 0.0, 1.0, "transfer"),
)
BARS = [Bar("a", 2.0, 1.0, 3.0, "a: 2 ms"), Bar("<b>", 4.0, 4.0, 4.0, "b: 4 ms")]
LOSSES = [Line("plain", ((1, 5.5), (2, 4.25))), Line("ours", ((1, 5.5),), True)]
PICTURES = [
    bars("Times", "ms", BARS, ("Megatron's order", 3.0))._replace(answer="a is shorter"),
    lines("Losses", "iteration", LOSSES, line=("1", 1.0), whole=True),
    gantt("Layer", "ms", [Row("plain: 3 ms", ("compute", "links"), BITS)]),
    heat("Gain", "tokens", [("4k", "TP 2", 0.0), ("8k", "TP 2", 12.34)]),
    stacks("Memory", "GiB", [("a; 3 GiB", {"weights": 1.0, "rest": 2.0})], ("usable", 9.0)),
]


def test_a_page_has_everything_inside(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "page.html"
    table = Table(("what", "how much"), (("**a** & `b`", "</script>"),), "cells")
    sections = [Section("First", ("1 < 2",), PICTURES[0], (table,))]
    sections += [Section(picture.title, (), picture) for picture in PICTURES[1:]]
    words = ["commfuse-npu", "simulate", "--model", "a b"]
    write_page(path, "A <title>", ["Ours: **a**"], sections, environment(words))
    page = read(path)
    named = ["A <title>", "Verdict", "First", "Losses", "Layer", "Gain", "Memory"]
    assert [heading for _, heading in page.headings[:-1]] == named
    assert len(page.labels) == 5
    assert "a: 2 ms; b: 4 ms" in page.labels[0]
    assert "a is shorter" in page.text
    # Commands can be copied with a click, other code cannot.
    copied = re.findall(r'<code role="button"[^>]*>(.*?)</code>', path.read_text("utf-8"))
    assert copied == ["commfuse-npu simulate --model 'a b'"]
    assert page.tables[0] == ("cells", [["what", "how much"], ["a & b", "</script>"]])


def test_pictures_as_files(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    draw(PICTURES, "All of them", tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")

    def drawn(pictures: list, title: str, **width: int) -> str:
        draw(pictures, title, tmp_path / "all.svg", **width)
        return (tmp_path / "all.svg").read_text(encoding="utf-8")

    text = drawn(PICTURES, "All of them")
    for label in ("All of them", "a: 2 ms", "Megatron's order", "plain: 3 ms", "12.3", "rest"):
        assert f">{label}</text>" in text, label
    # On a narrow picture Vega would round the few figures of an axis.
    quarter = lines("Time", "ratio", [Line("ours", ((0.25, 1.0), (0.5, 2.0), (1.0, 3.0)))])
    narrow = drawn([quarter], "", width=320)
    assert all(f">{label}</text>" in narrow for label in ("0.25", "0.5", "1"))
    # No two of twenty lines look the same.
    twenty = [Line(f"line {i}", ((1, i), (2, i + 1)), i % 3 == 0) for i in range(20)]
    text = drawn([lines("Times", "ratio", twenty)], "All")
    marks = re.findall(r'd="([^"]+)" fill="(#\w+)"', text)
    assert len({mark for mark in marks if marks.count(mark) >= 2}) == 20


def test_what_cannot_be_drawn_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawing.util, "find_spec", lambda name: None)
    lacking = r"'a\.html' needs vl-.* install 'vl-convert-python>=1\.9', or leave the option out$"
    with pytest.raises(ArgumentTypeError, match=lacking):
        option_types.page("a.html")
    with pytest.raises(ValueError, match=r"a picture needs vl-convert-python; pip install"):
        draw(PICTURES, "None of them", tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
