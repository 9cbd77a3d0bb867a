"""The part of a file that a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evidence.markdown_section import replace_section


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    replace_section(path, "faults", "one\n")
    assert path.read_text() == "<!-- begin: faults -->\n\none\n\n<!-- end: faults -->\n"


def test_sections_come_to_the_end_and_stay_there(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Title\n")
    replace_section(path, "first", "old")
    replace_section(path, "second", "2")
    path.write_text(path.read_text() + "\nwritten by hand\n")
    replace_section(path, "first", "\nnew | \\1\n\n")
    assert path.read_text() == (
        "# Title\n\n"
        "<!-- begin: first -->\n\nnew | \\1\n\n<!-- end: first -->\n\n"
        "<!-- begin: second -->\n\n2\n\n<!-- end: second -->\n\n"
        "written by hand\n"
    )


def test_the_same_text_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    replace_section(path, "faults", "text")
    before = path.read_text()
    replace_section(path, "faults", "text")
    assert path.read_text() == before


@pytest.mark.parametrize(
    "broken",
    [
        "<!-- begin: a -->\n",
        "<!-- end: a -->\n",
        "<!-- end: a -->\n<!-- begin: a -->\n",
        "<!-- begin: a -->\n<!-- end: a -->\n" * 2,
    ],
)
def test_comments_that_do_not_pair_are_refused(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(broken)
    with pytest.raises(ValueError, match="repair it, or take both out"):
        replace_section(path, "a", "text")
    assert path.read_text() == broken
