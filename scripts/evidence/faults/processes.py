"""Starts the ranks of a scenario, reads what they left, and sees to it that they are gone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from scripts.evidence.faults import left_over
from scripts.evidence.faults.rank import Diary
from scripts.evidence.faults.scenario import Scenario

__all__ = ["Played", "Player", "Report"]

_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Report:
    """What a rank reported.

    Attributes:
        exit_code: negative for a signal; ``None`` if it did not end by itself.
        kinds: the exception's class and its bases, by name; empty without one.
        after: seconds from the fault to the exception; ``None`` without one or the other.
        right: whether every result had the bits of the plain form; ``None`` if it did not finish.
        output: of the process, with its traceback.
    """

    rank: int
    exit_code: int | None
    kinds: tuple[str, ...] = ()
    message: str = ""
    after: float | None = None
    right: bool | None = None
    output: str = ""


@dataclass(frozen=True)
class Played:
    """A scenario and what came of it.

    Attributes:
        struck: whether the fault happened at all.
        left: command lines of processes that had to be killed afterwards.
    """

    scenario: Scenario
    reports: tuple[Report, ...]
    struck: bool
    left: tuple[str, ...]


class Player:
    """Plays scenarios, one after the other.  Use it in a ``with`` block."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.evidence.faults.warm_start"],
            cwd=_ROOT,
            env={
                **os.environ,
                left_over.MARK: self._mark,
                "OMP_NUM_THREADS": "1",
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        left_over.end(self._mark, besides=set())

    def play(self, scenario: Scenario, *, limit: float | None = None) -> Played:
        """Play one scenario.

        Args:
            limit: in seconds; ranks that are left after it are killed.

        Raises:
            RuntimeError: the process that forks the ranks ended; its message is on stderr.
        """
        limit = 60.0 + 3 * scenario.timeout if limit is None else limit
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="commfuse-faults-") as name:
            folder = Path(name)
            try:
                pickle.dump((scenario, folder, limit), process.stdin)
                process.stdin.flush()
                ended: list[int | None] = pickle.load(process.stdout)
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    f"{scenario.name}: the process that forks the ranks ended: {error!r}"
                ) from error
            left = left_over.end(self._mark, besides={process.pid})
            return _played(scenario, folder, ended, left)


def _played(
    scenario: Scenario, folder: Path, ended: list[int | None], left: tuple[str, ...]
) -> Played:
    diaries = [Diary(folder, rank).read() for rank in range(scenario.ranks)]
    # A mismatch is there when the last rank has called.
    entries = [entry for diary in diaries for entry in diary]
    calls = [entry["at"] for entry in entries if entry["what"] == "calls"]
    struck = max(
        (entry["at"] for entry in entries if entry["what"] == "fault"),
        default=max(calls) if len(calls) == scenario.ranks else None,
    )
    reports = []
    for rank, diary in enumerate(diaries):
        output = folder / f"rank-{rank}.txt"
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        error = next((entry for entry in diary if entry["what"] == "error"), None)
        # A rank that slept through the fault has its own time from where it goes on.
        since = max((entry["at"] for entry in diary if entry["what"] == "woke"), default=struck)
        reports.append(
            Report(
                rank=rank,
                exit_code=ended[rank],
                kinds=tuple(error["kinds"]) if error else (),
                message=error["message"] if error else "",
                after=error["at"] - since if error and since is not None else None,
                right=next((e["right"] for e in diary if e["what"] == "finished"), None),
                output=text,
            )
        )
    return Played(scenario, tuple(reports), struck is not None, left)
