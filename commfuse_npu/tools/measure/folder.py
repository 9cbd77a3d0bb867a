"""What was measured so far: a file per step, written whole when the step is over.

So a run that is interrupted, killed or out of time leaves every step that it finished, and goes on
with the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.whole_file import write_json

__all__ = ["Folder", "FolderError"]

_VERSION = 2
_RUN = "run"


class FolderError(ValueError):
    """The folder cannot be gone on with, or begun in."""


class Folder:
    """Where the steps of a run are kept.

    Args:
        path: made if it is not there.
        about: what has to be the same for a run to be gone on with.
        resume: go on with what is there; else nothing may be there.

    Raises:
        FolderError: it holds another run, or one that is not to be gone on with.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise FolderError(f"{path} is no folder; choose another with --folder")
        stored = self._read(_RUN)
        expected = {"measure": _VERSION, **about}
        if stored is None:
            if resume:
                raise FolderError(
                    f"{path} holds no run to go on with; leave --resume out, or give its folder "
                    "with --folder"
                )
            if path.exists() and any(path.iterdir()):
                raise FolderError(f"{path} is not empty; choose a new folder with --folder")
            path.mkdir(parents=True, exist_ok=True)
            write_json(self._file(_RUN), expected, indent=1)
            return
        if not resume:
            raise FolderError(
                f"{path} holds a run already; go on with it by --resume, or choose another folder "
                "with --folder"
            )
        differing = [
            f"{name} {stored.get(name)!r} there, {value!r} here"
            for name, value in expected.items()
            if stored.get(name) != value
        ]
        if differing:
            raise FolderError(
                f"{path} holds another run: {'; '.join(differing)}; choose another folder with "
                "--folder, or the options of that run"
            )

    def keep(self, step: str, content: Mapping[str, Any]) -> None:
        """Write a step down.

        Raises:
            FolderError: it cannot be written.
        """
        try:
            write_json(self._file(step), content, indent=1)
        except OSError as error:
            raise FolderError(
                f"{self._file(step)}: {error.strerror or error}; make room, or take another "
                "--folder"
            ) from error

    def kept(self, step: str) -> dict[str, Any] | None:
        """What a step wrote; ``None`` if it is not there, or damaged, which is said."""
        try:
            return self._read(step)
        except FolderError as error:
            print(f"{error}, or it is written anew when {step} is over", file=sys.stderr)
            return None

    def _file(self, step: str) -> Path:
        return self.path / f"{step}.json"

    def _read(self, step: str) -> dict[str, Any] | None:
        path = self._file(step)
        try:
            content = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise FolderError(f"{path} cannot be read: {error}; remove it") from error
        if not isinstance(content, dict):
            raise FolderError(f"{path} is no file of a measurement; remove it")
        return content
