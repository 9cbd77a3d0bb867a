"""An extension of griffe: the docstrings of the sources, as Markdown.

They are written for whoever reads the source, with roles, literal blocks and tables of
reStructuredText.  mkdocstrings takes Markdown; what differs is put into its words here.
"""

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`(?P<shown>~?)(?P<name>[\w.]+)`")
_RULE = r" *=+(?: +=+)+ *\n"
_TABLE = re.compile(rf"^{_RULE}(?:.*\n)*?{_RULE}(?=\s*\n|\Z)", re.M)
_SECTION = re.compile(r"^(?:Args|Attributes|Raises):\n(?: {4}[^\n]*\n|\n)+", re.M)
_SEVERAL = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)+):(?P<what>[^\n]*\n(?: {5}[^\n]*\n)*)", re.M)


class Docstrings(griffe.Extension):
    """Changes every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value, obj)


def _markdown(text: str, scope: griffe.Object) -> str:
    # Indented lines are code in Markdown, too.
    text = _TABLE.sub(lambda table: textwrap.indent(table[0], "    "), f"{text}\n")
    text = re.sub(r"::$", ":", text, flags=re.M)
    text = _SECTION.sub(lambda section: _SEVERAL.sub(_one_by_one, section[0]), text)
    return _ROLE.sub(lambda role: _reference(role, scope), text)


def _one_by_one(match: re.Match[str]) -> str:
    """``a, b: what`` as an entry each, so that each gets its own type."""
    return "".join(f"    {name}:{match['what']}" for name in match["names"].split(", "))


def _reference(match: re.Match[str], scope: griffe.Object) -> str:
    """A link where the name has a page; else only the name."""
    name = match["name"]
    shown = name.rsplit(".", 1)[-1] if match["shown"] else name.lstrip(".")
    module = scope if scope.is_module else scope.module
    if name.startswith("."):
        package = module if module.is_init_module else module.parent
        path = f"{package.path}{name}" if package is not None else name
    else:
        path = _found(name, scope)
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'


def _found(name: str, scope: griffe.Object) -> str:
    first, _, rest = name.partition(".")
    try:
        found = scope.resolve(first)
    except griffe.NameResolutionError:
        return name
    return f"{found}.{rest}" if rest else found
