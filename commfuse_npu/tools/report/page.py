"""One HTML page: verdict, pictures with tables of their numbers, environment, command.

The page is self-contained: it includes script and numbers, and its policy forbids the browser to
fetch anything.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import NamedTuple

from commfuse_npu import __version__
from commfuse_npu.runtime.atomic_write import atomic_write
from commfuse_npu.tools.report.charts import Picture, Table
from commfuse_npu.tools.report.drawing import script

__all__ = ["Section", "environment", "write_page"]


class Section(NamedTuple):
    """A heading with paragraphs, a picture with its tables, or tables alone."""

    title: str
    texts: tuple[str, ...] = ()
    picture: Picture | None = None
    tables: tuple[Table, ...] = ()


def environment(words: Sequence[str]) -> dict[str, str]:
    """The origin of a page; ``words``: the command and its options."""
    return {
        "command": shlex.join(words),
        "commfuse-npu": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_page(
    path: Path,
    title: str,
    verdict: Sequence[str],
    sections: Sequence[Section],
    facts: Mapping[str, str],
) -> None:
    """Write the page.

    Raises:
        OSError: the file cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    charts: list[Picture] = []
    body = [f"<h1>{escape(title)}</h1><h2>Verdict</h2>", *_paragraphs(verdict)]
    for section in sections:
        body += [f"<h2>{escape(section.title)}</h2>", *_paragraphs(section.texts)]
        if (picture := section.picture) is not None:
            label = escape(picture.chart["description"], quote=True)
            body += _paragraphs(filter(None, (f"**{picture.answer}**", picture.note)))
            body += [f'<figure role="img" aria-label="{label}" id="chart-{len(charts)}"></figure>']
            charts.append(picture)
        body += map(_table, section.tables)
    body += ["<h2>Environment and command</h2>"]
    body += _paragraphs(f"{name}: `{fact}`" for name, fact in facts.items())
    code = script([chart.chart for chart in charts]) if charts else ""
    with atomic_write(path) as part:
        text = _PAGE.format(title=escape(title), body="\n".join(body), script=code)
        part.write_text(text, encoding="utf-8")


def _paragraphs(texts: Iterable[str]) -> list[str]:
    return [f"<p>{_marked(text)}</p>" for text in texts]


def _table(table: Table) -> str:
    head = "".join(f"<th>{_marked(cell)}</th>" for cell in table.head)
    rows = ("".join(f"<td>{_marked(cell)}</td>" for cell in row) for row in table.rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in (head, *rows))
    caption = f"<summary>{_marked(table.caption)}</summary>"
    return f"<details open>{caption}<table>{body}</table></details>"


def _marked(text: str) -> str:
    """HTML of a text, with Markdown's bold and code."""
    text = re.sub(r"`([^`]*--[^`]*)`", _COPIED, escape(text, quote=False))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


_COPIED = r'<code role="button" tabindex="0" title="copy">\1</code>'
"""Options can be copied, by a click or Enter."""

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: auto; padding: 1rem }}
figure {{ width: 100%; margin: 1rem 0 }}
details {{ overflow-x: auto; font-size: 0.85rem }}
code {{ overflow-wrap: anywhere }}
[role="button"] {{ cursor: copy; text-decoration: underline dotted }}
[role="button"]::after {{ content: " copy"; font: 0.75rem sans-serif; color: #4493f8 }}
@media (prefers-color-scheme: dark) {{
  figure text:is([fill="#000"], [fill="black"]) {{ fill: #ddd }}
  figure text[fill="#59636e"] {{ fill: #9aa4ae }}
  figure [stroke="#ddd"] {{ stroke: #444 }}
  figure [stroke="black"] {{ stroke: #bbb }}
}}
td, th {{ padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; white-space: nowrap }}
</style>
</head>
<body>
{body}
<script>
{script}
function copy(event) {{
  const code = event.target.closest("[role=button]");
  if (!code || event.type == "keydown" && event.key != "Enter") return;
  getSelection().selectAllChildren(code);
  document.execCommand("copy");
}}
["click", "keydown"].forEach(kind => document.addEventListener(kind, copy));
</script>
</body>
</html>
"""
