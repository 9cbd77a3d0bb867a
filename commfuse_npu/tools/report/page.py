"""One page of HTML: verdict, pictures each with the table of its numbers, environment, command.

It needs nothing else: style, script and numbers are inside, and its policy forbids the browser to
fetch anything.  Light or dark is what the reader's system says.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path

from commfuse_npu import __version__
from commfuse_npu.runtime.whole_file import whole_file
from commfuse_npu.tools.report.charts import Picture
from commfuse_npu.tools.report.drawing import script
from commfuse_npu.tools.report.palette import DARK, LIGHT
from commfuse_npu.tools.report.table import Table

__all__ = ["Section", "environment", "write_page"]


@dataclass(frozen=True)
class Section:
    """A heading, and what is below it: paragraphs, a picture with its tables, more tables."""

    title: str
    texts: tuple[str, ...] = ()
    picture: Picture | None = None
    tables: tuple[Table, ...] = ()


def environment(words: Sequence[str]) -> dict[str, str]:
    """What every page says about where it comes from.

    Args:
        words: the command and its options.
    """
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
        OSError: it cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    charts = [section.picture.chart for section in sections if section.picture is not None]
    lines = [_START.format(title=escape(title), style=_style())]
    lines += [f"<h1>{escape(title)}</h1>", '<section class="verdict" aria-labelledby="verdict">']
    lines += ['<h2 id="verdict">Verdict</h2>', *(f"<p>{_marked(line)}</p>" for line in verdict)]
    lines += ["</section>"]
    number = tables = 0
    for at, section in enumerate(sections):
        lines += [f'<section aria-labelledby="part-{at}">']
        lines += [f'<h2 id="part-{at}">{escape(section.title)}</h2>']
        lines += [f"<p>{_marked(text)}</p>" for text in section.texts]
        if section.picture is not None:
            if section.picture.note:
                lines += [f"<p>{_marked(section.picture.note)}</p>"]
            said = escape(str(section.picture.chart["description"]), quote=True)
            # Vega gives the element that it draws into attributes of its own.
            lines += [f'<figure role="img" aria-label="{said}">']
            lines += [f'<div class="chart" id="chart-{number}"></div>', "</figure>"]
            number += 1
        for table in (*section.tables, *(section.picture.tables if section.picture else ())):
            lines += _table(table, f"table-{tables}")
            tables += 1
        lines += ["</section>"]
    lines += ['<section aria-labelledby="environment">']
    lines += ['<h2 id="environment">Environment and command</h2>', "<dl>"]
    lines += [f"<dt>{escape(k)}</dt><dd>{_marked(f'`{v}`')}</dd>" for k, v in facts.items()]
    lines += ["</dl>", "</section>", "</main>"]
    lines += [f"<script>{script(charts)}</script>" if charts else "", "</body>", "</html>", ""]
    with whole_file(path) as part:
        part.write_text("\n".join(lines), encoding="utf-8")


def _table(table: Table, name: str) -> Iterator[str]:
    """With its caption outside of what scrolls.

    Args:
        name: an id of its own.
    """
    caption = _marked(table.caption)
    if table.folded:
        yield f'<details><summary id="{name}">The numbers: {caption}</summary>'
    else:
        yield f'<p class="caption" id="{name}">{caption}</p>'
    # Wider than a telephone: it scrolls by itself, with the keyboard, too.
    yield f'<div class="wide" role="region" tabindex="0" aria-labelledby="{name}">'
    yield f'<table aria-labelledby="{name}"><thead><tr>'
    yield from (f'<th scope="col">{_marked(cell)}</th>' for cell in table.head)
    yield "</tr></thead><tbody>"
    for first, *rest in table.rows:
        cells = "".join(f"<td>{_together(_marked(cell))}</td>" for cell in rest)
        yield f'<tr><th scope="row">{_marked(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
    if table.folded:
        yield "</details>"


def _together(cell: str) -> str:
    """A line ends before a range, not inside of it or between a number and its unit."""
    return re.sub(r" (?=\.\.|[a-zA-Z%])|(?<=\.\.) ", "&nbsp;", cell)


def _marked(text: str) -> str:
    """Escaped, with what Markdown marks."""
    text = re.sub(r"`([^`]+)`", _code, escape(text, quote=False))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def _code(found: re.Match[str]) -> str:
    # A line ends between words and not at a hyphen: options begin with two.
    return f"<code>{' '.join(f'<span>{word}</span>' for word in found[1].split())}</code>"


def _style() -> str:
    def names(colors: Mapping[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colors.items())

    dark = f"@media (prefers-color-scheme:dark){{:root{{{names(DARK)}}}}}"
    return f":root{{color-scheme:light dark;{names(LIGHT)}}}{dark}{_RULES}"


_START = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>"""

_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);line-height:1.5;
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:16px 20px 48px}
h1{text-wrap:balance;font-size:1.6rem;line-height:1.25;margin:.6em 0}
h2{font-size:1.2rem;margin:2em 0 .4em}
p{margin:.4em 0;max-width:44em}
.verdict p{max-width:66em}
code{font:.875em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.verdict{border-left:5px solid var(--blue);background:var(--shade);padding:.2em 1em .6em}
.verdict h2{margin-top:.5em}
figure{margin:1em 0}
.chart{width:100%}
.chart svg{display:block;max-width:100%}
.wide{overflow-x:auto;margin:.3em 0 .8em}
table{border-collapse:collapse;font-size:.8125rem;font-variant-numeric:tabular-nums}
.caption{color:var(--faint);font-size:.875rem;margin:1em 0 0;max-width:none}
code span{display:inline-block;max-width:100%}
td code span{white-space:nowrap;max-width:none}
th,td{padding:.3em .8em .3em 0;border-bottom:1px solid var(--grid);text-align:left;
 vertical-align:top}
thead th{border-bottom:2px solid var(--faint);vertical-align:bottom}
tbody th{font-weight:normal}
summary{cursor:pointer;color:var(--blue);padding:.3em 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2em 1em;margin:0}
dt{color:var(--faint)}
dd{margin:0;min-width:0}
:focus-visible{outline:2px solid var(--blue);outline-offset:2px}
#vg-tooltip-element{background:var(--paper);color:var(--ink);border:1px solid var(--faint);
 border-radius:4px;padding:6px 8px;font-size:13px;position:fixed;z-index:9;max-width:90vw;
 visibility:hidden;pointer-events:none}
#vg-tooltip-element.visible{visibility:visible}
#vg-tooltip-element td{white-space:normal;border:0;padding:0 .4em 0 0}
#vg-tooltip-element td.key{color:var(--faint)}
@media (max-width:600px){main{padding:8px 14px 32px}dl{grid-template-columns:1fr}
 dd{margin-bottom:.5em}}
"""
