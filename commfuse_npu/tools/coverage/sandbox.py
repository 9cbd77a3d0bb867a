"""Where a script's shell may run: without network, and with a copy in the place of its folder.

bubblewrap where it works: then everything else is read-only, too.  Else namespaces of ``unshare``.
Where neither may be used (a container can forbid both) the script runs in the copy, and the report
says that it was not kept from the network.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Sandbox", "sandbox"]

_TRIAL_SECONDS = 10
_MOUNT_AND_RUN = """\
copy=$1 place=$2 mount=$3
shift 3
"$mount" --bind "$copy" "$place" && cd "$place" && exec "$@"
"""


@dataclass(frozen=True)
class Sandbox:
    """A way to start a shell.

    Attributes:
        said: what it keeps from a script.
        inside: from the folder of copies, the copy and the folder that it stands for, the program
            with its arguments that starts another program there.
        in_place: whether a script finds the copy where its folder is.
    """

    said: str
    inside: Callable[[Path, Path, Path], list[str]]
    in_place: bool = True


def sandbox(scratch: Path, copy: Path, place: Path) -> Sandbox:
    """The first way that works here.

    Args:
        scratch: the folder of copies, which can be written.
        copy: of a folder, in ``scratch``.
        place: the folder.
    """
    for found in _ways():
        command = [*found.inside(scratch, copy, place), "/bin/sh", "-c", ":"]
        try:
            done = subprocess.run(
                command, cwd=copy, capture_output=True, timeout=_TRIAL_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue  # One way less; the last one says what is missing then.
        if done.returncode == 0:
            return found
    return Sandbox(
        "in a copy of their folder, but not kept from the network nor from files elsewhere: "
        "neither bwrap nor unshare works here",
        lambda scratch, copy, place: [],
        in_place=False,
    )


def _ways() -> list[Sandbox]:
    ways = []
    bwrap, unshare = shutil.which("bwrap"), shutil.which("unshare")
    mount, shell = shutil.which("mount"), shutil.which("sh")
    if bwrap is not None:
        ways.append(
            Sandbox(
                "by bwrap, in a copy of their folder, without network, all else read-only",
                lambda scratch, copy, place: [
                    *(bwrap, "--ro-bind", "/", "/", "--dev", "/dev", "--bind"),
                    *(str(scratch), str(scratch), "--bind", str(copy), str(place)),
                    *("--unshare-net", "--die-with-parent", "--chdir", str(place), "--"),
                ],
            )
        )
    if unshare is not None and mount is not None and shell is not None:
        ways.append(
            Sandbox(
                "by unshare, in a copy of their folder, without network",
                lambda scratch, copy, place: [
                    *(unshare, "--map-root-user", "--net", "--mount"),
                    *(shell, "-c", _MOUNT_AND_RUN, shell, str(copy), str(place), mount),
                ],
            )
        )
    return ways
