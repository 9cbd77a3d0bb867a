"""Runs launch scripts in a copy of the files that they read, without network.

Uses bubblewrap if it works, which also makes everything else read-only, or else namespaces of
``unshare``.  If neither is allowed (a container can forbid both), a script runs in the copy, and
the report says that it had network access.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError

__all__ = ["Sandbox"]

_READ_BY_SCRIPTS = (
    *(".sh", ".bash", ".env", ".conf", ".cfg", ".ini", ".txt", ".list"),
    *(".yaml", ".yml", ".json", ".toml", ""),
)
_LARGEST = 1 << 20
_MOST_FILES = 20_000
_TRIAL_SECONDS = 10
_MOUNT_AND_RUN = '"$0" --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'


class Sandbox:
    """A copy of a folder, in which scripts run as if it were the folder.

    It has the subfolders and the small files that a launch script may read: shell and configuration
    files up to 1 MB, and files without a suffix, such as lists of hosts.  It has no data, weights,
    hidden files or links to folders.

    Args:
        folder: the original.
        scratch: a folder that scripts may write to, which gets the copy.

    Attributes:
        copy: path of the copy.
        place: the path at which scripts see it: that of the folder, if the sandbox can do this.
        inside: a command prefix that starts a program in the sandbox.
        description: how scripts run, and from what they are isolated.

    Raises:
        UsageError: the folder has more than 20,000 such files.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self.copy = folder, scratch / "copy"
        self._make()
        for description, inside in _ways(scratch, self.copy, folder):
            if _works([*inside, "/bin/sh", "-c", ":"], self.copy):
                self.description, self.inside, self.place = description, inside, folder
                return
        self.inside, self.place = [], self.copy
        self.description = (
            "in a copy of their folder, but not kept from the network nor from files elsewhere: "
            "neither bwrap nor unshare works here"
        )

    def renew(self) -> None:
        """Recreate the copy if a script has changed it."""
        if self._state() != self._as_made:
            shutil.rmtree(self.copy)
            self._make()

    def _make(self) -> None:
        copied = 0
        for name, folders, files in os.walk(self._folder):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            target = self.copy / Path(name).relative_to(self._folder)
            target.mkdir(parents=True)
            for file in filter(_is_read, (Path(name, file) for file in files)):
                copied += 1
                if copied > _MOST_FILES:
                    raise UsageError(
                        f"{self._folder} has more than {_MOST_FILES:,} files that a script may "
                        "read (shell and configuration files up to 1 MB); give a folder of launch "
                        "scripts"
                    )
                shutil.copyfile(file, target / file.name)
                # Older than any file that a script writes.
                os.utime(target / file.name, (0, 0))
        self._as_made = self._state()

    def _state(self) -> dict[str, tuple[int, int]]:
        """The files with time and size, and the folders, to detect changes."""
        state = {}
        for name, _, files in os.walk(self.copy):
            state[name] = -1, -1
            for path in (os.path.join(name, file) for file in files):
                status = os.lstat(path)
                state[path] = status.st_mtime_ns, status.st_size
        return state


def _is_read(path: Path) -> bool:
    if path.name.startswith(".") or path.suffix not in _READ_BY_SCRIPTS or not os.path.isfile(path):
        return False
    return path.stat().st_size <= _LARGEST and os.access(path, os.R_OK)


def _ways(scratch: Path, copy: Path, place: Path) -> list[tuple[str, list[str]]]:
    """(description, command prefix) of each available sandbox; programs by their paths."""
    ways = []
    if bwrap := shutil.which("bwrap"):
        mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--bind", scratch, scratch]
        mounts += ["--bind", copy, place, "--unshare-net", "--die-with-parent", "--chdir", place]
        description = "by bwrap, in a copy of their folder, without network, all else read-only"
        ways.append((description, [bwrap, *map(str, mounts), "--"]))
    unshare, mount, shell = map(shutil.which, ("unshare", "mount", "sh"))
    if unshare and mount and shell:
        run = [shell, "-c", _MOUNT_AND_RUN, mount, str(copy), str(place)]
        description = "by unshare, in a copy of their folder, without network"
        ways.append((description, [unshare, "--map-root-user", "--net", "--mount", *run]))
    return ways


def _works(command: list[str], folder: Path) -> bool:
    try:
        process = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=_TRIAL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # This sandbox does not work; the description of the next one says so.
    return process.returncode == 0
