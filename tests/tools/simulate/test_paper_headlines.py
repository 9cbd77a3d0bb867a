"""The script that looks for the paper's headlines."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_npu.tools.simulate.sweep import Range
from scripts.evidence import paper
from scripts.evidence.markdown_section import replace_section
from scripts.evidence.paper import PARTS, Case, cases, main, report


def case(**changes: object) -> Case:
    same = Range(0.5, 0.5, 0.5)
    low = Range(0.1, 0.1, 0.1)
    base = Case("layer", "machine", 2, "model", 4096, same, "commfuse-c1-l1", same, same, low)
    return base._replace(**changes)


def test_a_headline_counts_where_it_is_reached() -> None:
    found = [
        case(),
        case(sequence=8192, waiting=Range(0.9, 0.998, 0.999)),
        case(sequence=16384, waiting=Range(0.9, 0.95, 0.999), shorter=Range(0.1, 0.4, 0.45)),
    ]
    text = report(found)
    assert "- 99.7% of the overhead removed: 0 (0); the most is 50.0 (50.0 .. 50.0)" in text
    assert "- 99.7% of the waiting removed: 1 (2); the most is 99.8 (90.0 .. 99.9)" in text
    assert "- 36.9% shorter: 1 (1); the most is 40.0 (10.0 .. 45.0), machine, TP 2" in text
    # A row per group of ranks: the sequence length with the largest gain.
    assert text.count("| machine | 2 | model |") == 1
    assert "| machine | 2 | model | 16384 |" in text


@pytest.mark.long
def test_every_part_is_simulated() -> None:
    found = list(cases(["ascend_910b_server"], ["llama3_8b"], [4096]))
    assert [(one.tp, one.part) for one in found] == [(tp, p) for tp in (2, 4, 8) for p in PARTS]
    for one in found:
        assert one.ratio.low <= one.ratio.typical <= one.ratio.high
        # Nothing can be shorter by more than what communication takes, here and at any end.
        bound = Range(*(ratio / (1 + ratio) for ratio in one.ratio))
        assert one.shorter.typical <= bound.typical + 1e-9, one
        assert one.shorter.high <= bound.high + 1e-9, one
        assert one.waiting.high <= 1 + 1e-9


def test_the_section_of_a_file_is_written_anew(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "paper.md"
    file.write_text("# Title\n\n<!-- begin: headlines -->\nold\n<!-- end: headlines -->\n\nend\n")
    monkeypatch.setattr(paper, "cases", lambda *_: [case(part="gather, fc1")])
    assert main(["--markdown", str(file)]) == 0
    text = file.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("end\n")
    assert "old" not in text
    assert "### gather, fc1" in text
    file.write_text("<!-- end: headlines -->")
    with pytest.raises(ValueError, match="it has to have each once"):
        replace_section(file, "headlines", "new")
