"""A page as its tests see it: headings, tables, and that it fetches nothing."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import NamedTuple


class Page(NamedTuple):
    """Rows have the head first; labels are of pictures; the text is without its marks."""

    headings: list[tuple[int, str]]
    tables: list[tuple[str, list[list[str]]]]
    labels: list[str]
    text: str


def _said(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html))


def read(path: Path) -> Page:
    """The page, with what is true of every page checked."""
    source = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in source
    # A script's end inside a script would end it.
    assert source.count("</script") == source.count("<script>") <= 1
    body = re.sub(r"<(script|style)>.*?</\1>", "", source, flags=re.S)
    assert not re.search(r"<[^>]*\s(src|href|srcset|action|data|poster)\s*=", body)
    headings = [(int(level), _said(what)) for level, what in re.findall(r"<h(\d)>(.*?)</h", body)]
    assert [level for level, _ in headings].count(1) == 1
    assert (headings[1], headings[-1]) == ((2, "Verdict"), (2, "Environment and command"))
    tables = []
    for caption, rows in re.findall(r"<summary>(.*?)</summary><table>(.*?)</table>", body, re.S):
        cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*", rows)]
        tables.append((_said(caption), [list(map(_said, row)) for row in cells]))
    labels = re.findall(r'<figure role="img" aria-label="([^"]+)" id="chart-\d+">', body)
    assert len(labels) == body.count("<figure")
    return Page(headings, tables, [unescape(label) for label in labels], _said(body))
