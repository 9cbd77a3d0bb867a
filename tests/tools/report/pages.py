"""A page as its tests see it: headings, tables, and what it would fetch."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["Page", "read"]

_FETCHING = {"src", "href", "srcset", "action", "data", "poster"}
_KEPT = ("th", "td", "h1", "h2", "summary")


@dataclass
class Page(HTMLParser):
    """What is in it.

    Attributes:
        headings: level and text.
        tables: by caption, rows of cells with the head first.
        fetched: attributes that would make a browser fetch something.
        labels: of pictures.
        charts: ids of pictures.
    """

    headings: list[tuple[int, str]] = field(default_factory=list)
    tables: list[tuple[str, list[list[str]]]] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    charts: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._script, self._said = False, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.fetched += [f"{tag} {name}" for name in _FETCHING & known.keys()]
        self._script = tag in ("script", "style")
        if tag == "figure":
            self.labels.append(known["aria-label"])
            self.charts.append(known["id"])
        elif tag == "table":
            self.tables.append((self._said, []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in _KEPT:
            self._said = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self.tables[-1][1][-1].append(self._said)
        elif tag in ("h1", "h2"):
            self.headings.append((int(tag[1]), self._said))
        self._script = False

    def handle_data(self, data: str) -> None:
        if not self._script:
            self.text += data
            self._said += data


def read(path: Path) -> Page:
    """The page, with what is true of every page checked."""
    source = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(source)
    assert page.fetched == []
    assert "default-src 'none'" in source
    # A script's end inside a script would end it.
    assert source.count("</script") == source.count("<script>") <= 1
    assert [level for level, _ in page.headings].count(1) == 1
    assert page.headings[1] == (2, "Verdict")
    assert page.headings[-1] == (2, "Environment and command")
    assert page.charts == [f"chart-{number}" for number in range(len(page.labels))]
    assert all(page.labels), "a picture without words"
    for caption, (head, *rows) in page.tables:
        assert caption
        assert all(len(row) == len(head) for row in rows)
    return page
