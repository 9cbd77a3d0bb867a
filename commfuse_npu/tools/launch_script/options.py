"""The options of a command line as data: the words from one ``--name`` to the next.

Without the script's parser nothing more is known, and MindSpeed-LLM itself reads options this way
before it has a parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from commfuse_npu.tools.launch_script import UsageError

__all__ = ["Options"]


class Options:
    """The options of a script in order, and a record of every change to them.

    Attributes:
        changes: one line per change, ``--option old -> new``.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.changes: list[str] = []
        self._items: list[tuple[str, list[str]]] = []
        for word in words:
            if word.startswith("--"):
                name, has_value, value = word.partition("=")
                self._items.append((name, [value] if has_value else []))
            elif self._items:
                self._items[-1][1].append(word)
            else:
                raise UsageError(
                    f"the script's arguments begin with {word!r} where an option is expected"
                )

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._items]

    @property
    def words(self) -> list[str]:
        return [word for name, values in self._items for word in (name, *values)]

    def values(self, name: str) -> list[str]:
        """The values of an option; of its last occurrence, as in argparse."""
        return list(dict(self._items).get(name, ()))

    def text(self, name: str) -> str | None:
        """The values joined by spaces; ``None`` if the option is absent or has no values."""
        return " ".join(self.values(name)) or None

    def number(self, name: str, default: int) -> int:
        """The value as a whole number, at least 1 or ``default``; ``default`` if absent.

        Raises:
            UsageError: it is not such a number.
        """
        if name not in self:
            return default
        text, least = self.text(name) or "", min(1, default)
        # No size has more digits.
        if not re.fullmatch(r"-?\d{1,12}", text, re.ASCII) or int(text) < least:
            raise UsageError(f"{name} is {text[:40]!r}; give a whole number from {least}")
        return int(text)

    def set(self, name: str, *values: object, why: str = "") -> None:
        """Set the values of an option, in place or at the end, and record the change."""
        new = [str(value) for value in values]
        present = name in self
        if present and self.values(name) == new:
            return
        old = " ".join(self.values(name)) if present else "(not given)"
        self._note(name, old, " ".join(new) or "given", why)
        place = self.names.index(name) if present else len(self._items)
        self._remove(name)
        self._items.insert(place, (name, new))

    def drop(self, *names: str, why: str = "") -> None:
        """Remove options, and record those that were there."""
        for name in names:
            if name in self:
                self._note(name, " ".join(self.values(name)), "(dropped)", why)
                self._remove(name)

    def copy(self) -> Options:
        """The same options, without recorded changes."""
        return Options(self.words)

    def _note(self, name: str, old: str, new: str, why: str) -> None:
        change = " ".join(filter(None, (name, old, "->", new)))
        self.changes.append(f"{change}   ({why})" if why else change)

    def _remove(self, name: str) -> None:
        self._items = [item for item in self._items if item[0] != name]
