"""A page as its tests see it: headings, tables, and what it would fetch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["Page", "read"]

_FETCHING = ("src", "href", "srcset", "action", "data", "poster")


@dataclass
class Page(HTMLParser):
    """What is in it.

    Attributes:
        headings: level and text.
        tables: by caption, rows of cells with the head first.
        fetched: attributes that would make a browser fetch something.
        labels: of pictures.
        ids: of elements.
        scrolled: what names the parts that the keyboard scrolls.
    """

    headings: list[tuple[int, str]] = field(default_factory=list)
    tables: list[tuple[str, list[list[str]]]] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    scrolled: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._into: list[str] | None = None
        self._script = self._caption = False
        self._said = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.fetched += [f"{tag} {name}" for name in known if name in _FETCHING]
        self._script = tag in ("script", "style")
        if "id" in known:
            self.ids.append(known["id"])
        if known.get("role") == "img":
            self.labels.append(known["aria-label"])
        if known.get("tabindex") == "0":
            self.scrolled.append(known["aria-labelledby"])
        if tag in ("p", "summary") and known.get("id", "").startswith("table-"):
            self._into, self._caption = [], True
        if tag == "table":
            self.tables.append((self._said, []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("th", "td", "h1", "h2"):
            self._into = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._script = False
        if self._into is None:
            return
        said = "".join(self._into)
        if tag in ("th", "td"):
            self.tables[-1][1][-1].append(said)
        elif self._caption:
            self._said, self._caption = said, False
        elif tag in ("h1", "h2"):
            self.headings.append((int(tag[1]), said))
        else:
            return
        self._into = None

    def handle_data(self, data: str) -> None:
        if self._script:
            return
        data = data.replace("\N{NO-BREAK SPACE}", " ")
        self.text += data
        if self._into is not None:
            self._into.append(data)


def read(path: Path) -> Page:
    """The page, with what is true of every page checked."""
    source = path.read_text(encoding="utf-8")
    assert len(source) < 5e6
    page = Page()
    page.feed(source)
    assert page.fetched == []
    assert "default-src 'none'" in source
    # A script's end inside a script would end it.
    assert source.count("</script") == source.count("<script>")
    style = source.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme:dark" in style
    assert [level for level, _ in page.headings].count(1) == 1
    assert page.headings[1] == (2, "Verdict")
    assert page.headings[-1] == (2, "Environment and command")
    assert len(page.ids) == len(set(page.ids))
    charts = [name for name in page.ids if name.startswith("chart-")]
    assert charts == [f"chart-{number}" for number in range(len(page.labels))]
    assert all(page.labels), "a picture without words"
    assert all(caption for caption, _ in page.tables)
    assert page.scrolled == [f"table-{number}" for number in range(len(page.tables))]
    assert set(page.scrolled) <= set(page.ids)
    for _, (head, *rows) in page.tables:
        assert all(len(row) == len(head) for row in rows)
    assert re.search(r'<html lang="en">', source)
    return page
