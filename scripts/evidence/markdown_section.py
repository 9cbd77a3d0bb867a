"""A part of a Markdown file that a command writes, between two comments that name it.

What stands around it is written by hand and stays::

    <!-- begin: layers -->
    ...
    <!-- end: layers -->
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["replace_section"]


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the comments of ``name``; at the end of the file if there are none.

    The file is made if it is not there.

    Args:
        name: one line, without ``-->``.
        text: Markdown, with or without a newline at its end.

    Raises:
        ValueError: one comment is there without the other, twice, or behind the other.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    whole = path.read_text(encoding="utf-8") if path.exists() else ""
    section = f"{begin}\n\n{text.strip()}\n\n{end}"
    counts = whole.count(begin), whole.count(end)
    if counts == (0, 0):
        above = f"{whole.rstrip()}\n\n" if whole.strip() else ""
        path.write_text(f"{above}{section}\n", encoding="utf-8")
        return
    if counts != (1, 1) or whole.index(end) < whole.index(begin):
        raise ValueError(
            f"{path} has {counts[0]} times {begin!r} and {counts[1]} times {end!r}; it has to have "
            "each once, in this order: repair it, or take both out to get the section at the end"
        )
    before, rest = whole.split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{section}{after}", encoding="utf-8")
