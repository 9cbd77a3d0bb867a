"""A command's section of a Markdown file is replaced, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.markdown_section import replace_section


def test_made_then_replaced_between_other_text(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    replace_section(file, "one", "first")
    assert file.read_text("utf-8") == "<!-- one: begin -->\nfirst\n<!-- one: end -->\n"
    file.write_text("# Title\n\n" + file.read_text("utf-8") + "\nthe end\n", "utf-8")
    replace_section(file, "two", "other")
    replace_section(file, "one", "\nsecond\n\nline\n")
    assert file.read_text("utf-8") == (
        "# Title\n\n<!-- one: begin -->\nsecond\n\nline\n<!-- one: end -->\n\nthe end\n\n"
        "<!-- two: begin -->\nother\n<!-- two: end -->\n"
    )


@pytest.mark.parametrize(
    "text",
    ["<!-- a: begin -->\n", "<!-- a: end -->\n", "<!-- a: end -->\n<!-- a: begin -->\n"],
)
def test_half_a_section_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "page.md"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match="put both there, or take both out"):
        replace_section(file, "a", "new")
    assert file.read_text("utf-8") == text
