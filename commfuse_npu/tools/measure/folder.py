"""A folder with one file per finished step, so that a run can be resumed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.atomic_write import write_json

__all__ = ["Deadline", "Folder", "FolderError", "different"]

_VERSION = 5


class FolderError(ValueError):
    """The folder cannot be used: to resume a run, or to start one."""


def different(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """The facts that differ from the stored ones; empty if none do."""
    return "; ".join(
        f"{name} {there.get(name)!r} there, {value!r} here"
        for name, value in here.items()
        if there.get(name) != value
    )


class Deadline:
    """No step starts after ``minutes``; a running one is ended 10 % later."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        start = time.monotonic()
        self._last, self._end = start + 60 * minutes, start + 66 * minutes

    @property
    def over(self) -> bool:
        return time.monotonic() > self._last

    def limit(self, seconds: float) -> float:
        """Seconds for a step that starts now and may take ``seconds``; at least 1."""
        return max(1.0, min(seconds, self._end - time.monotonic()))


class Folder:
    """The results of a run, one file per step.

    Args:
        path: created if missing.
        facts: options that must be the same to resume a run.
        resume: use existing results; otherwise the folder must be empty.

    Raises:
        FolderError: it has another run, none to resume, or other files.
        OSError: it cannot be created.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise FolderError(f"{path} is no folder; choose another with --folder")
        stored, expected = self._read("run"), {"measure": _VERSION, **facts}
        if stored is None:
            if resume:
                raise FolderError(
                    f"{path} holds no run to resume; leave --resume out, or give its folder with "
                    "--folder"
                )
            if path.exists() and any(path.iterdir()):
                raise FolderError(f"{path} is not empty; choose a new folder with --folder")
            path.mkdir(parents=True, exist_ok=True)
            write_json(self._file("run"), expected, indent=1)
        elif not resume:
            raise FolderError(
                f"{path} holds a run; continue it with --resume, or choose another --folder"
            )
        elif differing := different(expected, stored):
            raise FolderError(
                f"{path} holds another run: {differing}; choose another --folder, or the options "
                "of that run"
            )

    def store(self, step: str, content: Mapping[str, Any]) -> None:
        """Store the result of a step.

        Raises:
            FolderError: it cannot be written.
        """
        try:
            write_json(self._file(step), content, indent=1)
        except OSError as error:
            raise FolderError(
                f"{self._file(step)}: {error.strerror or error}; free some space, or choose "
                "another --folder"
            ) from error

    def load(self, step: str) -> dict[str, Any] | None:
        """The stored result of a step; ``None`` if missing or, with a warning, damaged."""
        try:
            return self._read(step)
        except FolderError as error:
            print(f"{error}; {step} is measured again", file=sys.stderr)
            return None

    def _file(self, step: str) -> Path:
        return self.path / f"{step}.json"

    def _read(self, step: str) -> dict[str, Any] | None:
        path = self._file(step)
        try:
            content = json.loads(path.read_text("utf-8"))
            if not isinstance(content, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise FolderError(f"{path} cannot be read: {error}; remove it") from error
        return content
