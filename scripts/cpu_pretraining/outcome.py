"""The results of a training: metrics.jsonl, loss.png, its speed, and how it ended."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from commfuse_npu.tools.quartiles import Range, quartiles
from commfuse_npu.tools.report.charts import Picture, lines
from commfuse_npu.tools.report.drawing import draw

__all__ = ["WARM_UP_ITERATIONS", "MetricsLog", "Outcome", "Wait", "draw_picture",
           "plot_loss", "read_metrics", "written"]  # fmt: skip

WARM_UP_ITERATIONS = 3
"""Iterations that do not count: they create buffers and threads and prepare GEMM kernels."""

Wait = tuple[float, float]
"""The start and the end of a rank's wait for a transfer, in seconds."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete entries of a metrics file; a last line cut off by a kill is skipped."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class MetricsLog:
    """Appends entries to ``path``; each is passed to the kernel at once.

    ``keep_until`` is the iteration from which a resumed run continues: later entries will be
    repeated, and are dropped.
    """

    def __init__(self, path: Path, keep_until: int) -> None:
        entries = [entry for entry in read_metrics(path) if entry["iteration"] <= keep_until]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
        partial.replace(path)
        self._path, self._failed = path, False

    def append(self, entry: dict[str, Any]) -> None:
        """Add one entry; ``entry["iteration"]`` is required.

        A write error (a full disk) is reported once, and the training continues without metrics.
        """
        if self._failed:
            return  # after a partial line the rest would be unreadable
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(entry)}\n")
        except OSError as error:
            self._failed = True
            why = f"{self._path} cannot be written any more: {error.strerror}; the training goes on"
            print(f"cpu_pretraining: {why}", file=sys.stderr, flush=True)


def written(folder: Path) -> str:
    """The existing files of a run, in one line."""
    names = ("metrics.jsonl", "loss.png", "checkpoints")
    return f"written: {', '.join(str(folder / name) for name in names if (folder / name).exists())}"


def draw_picture(picture: Picture, title: str, path: Path) -> str:
    """Draw a picture; returns why that was not possible, or an empty string."""
    try:
        draw(picture, title, path)
    except (OSError, ValueError) as error:
        return f"{path} was not drawn: {getattr(error, 'strerror', None) or error}"
    return ""


def plot_loss(folder: Path) -> None:
    """Draw the loss over the iterations into ``loss.png``, or print why not."""
    entries = read_metrics(folder / "metrics.jsonl")
    curve = [(entry["iteration"], entry["lm_loss"]) for entry in entries]
    picture = lines("lm loss, nats per byte, lower is better", "iteration", {"training": curve})
    title = f"{folder.name}: loss over the training"
    if why := draw_picture(picture, title, folder / "loss.png"):
        print(why, flush=True)


@dataclass
class Outcome:
    """How a training ended, on one rank.

    Attributes:
        entries: of ``metrics.jsonl``, one for each iteration of this process.
        fastest, waits: seconds of the fastest iteration that counts, and this rank's waits for
            transfers in it.
        tokens: per iteration, over all ranks.
        link: description of the links between the ranks.
        weights_sha256: of all ranks' weights and optimizers.
        layers: lines about the layers and their calls.
        stopped: by a signal, after ``iteration``.
        error, code: why the training failed, and the exit code for it.
    """

    iteration: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)
    fastest: float = math.inf
    waits: Sequence[Wait] = ()
    tokens: int = 0
    link: str = "loopback"
    weights_sha256: str = ""
    layers: list[str] = field(default_factory=list)
    stopped: bool = False
    error: str = ""
    code: int = 0

    def add(self, entry: dict[str, Any], waits: Sequence[Wait]) -> None:
        """Add an iteration; its waits are in seconds since its start."""
        self.entries.append(entry)
        seconds = entry["elapsed_ms"] / 1e3
        if len(self.entries) > WARM_UP_ITERATIONS and seconds < self.fastest:
            self.fastest, self.waits = seconds, waits

    @property
    def losses(self) -> dict[int, float]:
        """Losses by iteration."""
        return {entry["iteration"]: entry["lm_loss"] for entry in self.entries}

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The entries after the first :data:`WARM_UP_ITERATIONS`."""
        return self.entries[WARM_UP_ITERATIONS:]

    @property
    def seconds(self) -> Range:
        """Quartiles of the wall time of those iterations, which is a mean over the ranks."""
        return quartiles([entry["elapsed_ms"] / 1e3 for entry in self.counted])

    def describe_speed(self) -> str:
        """Tokens/s and seconds; an empty string if no iteration came after the warm-up."""
        if not self.counted:
            return ""
        fast, middle, slow = self.seconds
        blocked = median(entry["exposed_ms"] / 1e3 for entry in self.counted)
        first, last = (self.counted[index]["iteration"] for index in (0, -1))
        return (
            f"{self.tokens / middle:.0f} over {self.link} ({middle:.3f} s per iteration, quartiles "
            f"{fast:.3f} and {slow:.3f}, of which {blocked:.3f} s waiting for transfers; medians "
            f"of iterations {first} to {last})"
        )
