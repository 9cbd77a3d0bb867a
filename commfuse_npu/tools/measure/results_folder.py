"""The results of a measurement in one file, which the same command continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.tools.launch_script import UsageError


class Folder:
    """The results of a run, ``steps`` by name, in ``measured.json``.

    Args:
        path: created with the first result.
        facts: see :meth:`agree`.

    Raises:
        UsageError: its results have other facts, or it cannot be read.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._file = path / "measured.json"
        self._facts: dict[str, Any] = {}
        self.steps: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            try:
                stored = json.loads(self._file.read_text("utf-8"))
                self._facts = dict(stored["facts"])
                self.steps = {name: dict(step) for name, step in dict(stored["steps"]).items()}
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise UsageError(
                    f"{self._file} cannot be read: {error!r}; remove it, or choose another --folder"
                ) from error
        self.agree(facts)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Add facts, which must be the same for all results: sizes, versions, the machine.

        Raises:
            UsageError: a result has another fact.
        """
        other = [
            f"{name} {self._facts[name]!r} there, {value!r} here"
            for name, value in facts.items()
            if self._facts.get(name, value) != value
        ]
        if other:
            raise UsageError(
                f"{self._file} was measured under other conditions: {'; '.join(other)}; choose "
                "another folder with --folder"
            )
        self._facts |= facts

    def store(self, step: str, content: Mapping[str, Any]) -> None:
        """Store the result of a step.

        Raises:
            UsageError: it cannot be written.
        """
        self.steps[step] = dict(content)
        try:
            write_json(self._file, {"facts": self._facts, "steps": self.steps}, indent=1)
        except OSError as error:
            raise UsageError(
                f"{self._file} cannot be written: {error.strerror or error}; make that possible, "
                "or choose another --folder"
            ) from error
