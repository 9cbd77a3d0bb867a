"""A copy of what launch scripts read, so that nothing of the user's is written."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError

__all__ = ["ScratchCopy"]

_READ_BY_SCRIPTS = (
    *(".sh", ".bash", ".env", ".conf", ".cfg", ".ini", ".txt", ".list"),
    *(".yaml", ".yml", ".json", ".toml", ""),
)
_LARGEST = 1 << 20
_MOST_FILES = 20_000


class ScratchCopy:
    """A copy of a folder: its folders, and the small files that a launch script may read.

    That are shell and configuration files up to 1 MB, and files without a suffix, as lists of hosts
    are; no data, no weights, nothing hidden, no links to folders.

    Args:
        folder: the original.
        place: where the copy is made.

    Raises:
        UsageError: more files than launch scripts read.
    """

    def __init__(self, folder: Path, place: Path) -> None:
        self._folder, self.place = folder, place
        self._as_made: dict[str, tuple[int, int]] = {}
        self._make()

    def renew(self) -> None:
        """Make it anew if a script has changed it."""
        if self._state() != self._as_made:
            shutil.rmtree(self.place)
            self._make()

    def _make(self) -> None:
        copied = 0
        for name, folders, files in os.walk(self._folder):
            folders[:] = [one for one in folders if not one.startswith(".")]
            target = self.place / Path(name).relative_to(self._folder)
            target.mkdir(parents=True, exist_ok=True)
            for file in files:
                if not _is_read(Path(name, file)):
                    continue
                copied += 1
                if copied > _MOST_FILES:
                    raise UsageError(
                        f"{self._folder} has more than {_MOST_FILES:,} files that a script may "
                        "read (shell and configuration files up to 1 MB); give a folder of launch "
                        "scripts"
                    )
                shutil.copyfile(Path(name, file), target / file)
                # Older than whatever a script writes.
                os.utime(target / file, (0, 0))
        self._as_made = self._state()

    def _state(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name, folders, files in os.walk(self.place):
            for one in (*folders, *files):
                path = os.path.join(name, one)
                is_folder = one in folders
                status = os.lstat(path)
                found[path] = (-1, -1) if is_folder else (status.st_mtime_ns, status.st_size)
        return found


def _is_read(path: Path) -> bool:
    if path.name.startswith(".") or path.suffix not in _READ_BY_SCRIPTS:
        return False
    try:
        status = path.stat()
    except OSError:
        return False  # A link to nowhere.
    return stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST and os.access(path, os.R_OK)
