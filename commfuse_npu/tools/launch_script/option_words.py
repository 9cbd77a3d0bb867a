"""The options of a command line as data: the words from one ``--name`` to the next.

Without the script's parser nothing more is known, and MindSpeed-LLM itself reads options this way
before it has a parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from commfuse_npu.removed import RENAMED
from commfuse_npu.tools.launch_script import UsageError


class Options:
    """The options of a script in order, and a record of every change to them.

    Attributes:
        changes: one line per change, ``--option old -> new``.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.changes: list[str] = []
        self._values: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if word.startswith("--"):
                name, has_value, value = word.partition("=")
                name = RENAMED.get(name, name)
                self._values[name] = [value] if has_value else []
            elif name:
                self._values[name].append(word)
            else:
                raise UsageError(
                    f"the script's arguments begin with {word!r} where an option is expected"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> list[str]:
        return list(self._values)

    @property
    def words(self) -> list[str]:
        return [word for name, values in self._values.items() for word in (name, *values)]

    def values(self, name: str) -> list[str]:
        """The values of an option; of its last occurrence, as in argparse."""
        return list(self._values.get(name, ()))

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
        text = self.text(name) or ""
        least = min(1, default)
        # No size has more digits.
        if not re.fullmatch(r"-?\d{1,12}", text, re.ASCII) or int(text) < least:
            raise UsageError(f"{name} is {text[:40]!r}; give a whole number from {least}")
        return int(text)

    def set(self, name: str, *values: object, why: str = "") -> None:
        """Set the values of an option, in place or at the end, and record the change."""
        new = [str(value) for value in values]
        if self._values.get(name) != new:
            old = " ".join(self._values[name]) if name in self else "(not given)"
            self._note(name, old, " ".join(new) or "given", why)
            self._values[name] = new

    def drop(self, *names: str, why: str = "") -> None:
        """Remove options, and record those that were there."""
        for name in names:
            if name in self:
                self._note(name, " ".join(self._values.pop(name)), "(dropped)", why)

    def copy(self) -> Options:
        """The same options, without recorded changes."""
        return Options(self.words)

    def _note(self, name: str, old: str, new: str, why: str) -> None:
        change = " ".join(filter(None, (name, old, "->", new)))
        self.changes.append(f"{change}   ({why})" if why else change)
