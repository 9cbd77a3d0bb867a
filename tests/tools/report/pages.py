"""A page as its tests see it: headings, tables, and that it fetches nothing."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import NamedTuple


class Page(NamedTuple):
    """Tables start with their head; labels are of pictures; the text has no markup."""

    headings: list[tuple[int, str]]
    tables: list[tuple[str, list[list[str]]]]
    labels: list[str]
    text: str


def _said(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html))


def read(path: Path) -> Page:
    """Parses a page, and checks what has to hold for every page."""
    source = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in source
    # A script's end inside a script would end it.
    assert source.count("</script") == source.count("<script>") <= 1
    body = re.sub(r"<(script|style)>.*?</\1>", "", source, flags=re.S)
    assert not re.search(r"<[^>]*\s(src|href|srcset|action|data|poster)\s*=", body)
    headings = [(int(level), _said(text)) for level, text in re.findall(r"<h(\d)>(.*?)</h", body)]
    assert [level for level, _ in headings].count(1) == 1
    assert (headings[1], headings[-1]) == ((2, "Verdict"), (2, "Environment and command"))
    tables = []
    for caption, rows in re.findall(r"<summary>(.*?)</summary><table>(.*?)</table>", body, re.S):
        cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*", rows)]
        tables.append((_said(caption), [list(map(_said, row)) for row in cells]))
    labels = re.findall(r'<figure role="img" aria-label="([^"]+)" id="chart-\d+">', body)
    assert len(labels) == body.count("<figure")
    return Page(headings, tables, [unescape(label) for label in labels], _said(body))
