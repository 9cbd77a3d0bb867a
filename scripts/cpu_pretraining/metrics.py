"""What a run leaves behind to look at: metrics.jsonl, loss.png, and how it ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from commfuse_npu.tools.measure.figures import Range, quartiles
from commfuse_npu.tools.report.charts import Line, lines
from commfuse_npu.tools.report.drawing import draw

__all__ = ["WARM_UP_ITERATIONS", "MetricsLog", "Outcome", "Speed", "plot_loss", "read_metrics",
           "speed_of", "written"]  # fmt: skip

WARM_UP_ITERATIONS = 3
"""Iterations that do not count: buffers, threads and the kernels of the GEMMs come with them."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete entries of a metrics file; a last line cut off by a kill is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class MetricsLog:
    """Appends entries to ``path``; each is on disk as far as the kernel is concerned at once.

    ``keep_until`` is the iteration from which a resumed run goes on: entries beyond it are about to
    be repeated, and are dropped.
    """

    def __init__(self, path: Path, keep_until: int) -> None:
        kept = [entry for entry in read_metrics(path) if entry["iteration"] <= keep_until]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(entry)}\n" for entry in kept), encoding="utf-8")
        partial.replace(path)
        self._path, self._failed = path, False

    def append(self, entry: dict[str, Any]) -> None:
        """Add one entry; ``entry["iteration"]`` is required.

        What cannot be written (a full disk) is said once, and the training goes on without.
        """
        if self._failed:
            return  # behind half a line nobody could read the rest
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(entry)}\n")
        except OSError as error:
            self._failed = True
            why = f"{self._path} cannot be written any more: {error.strerror}; the training goes on"
            print(f"cpu_pretraining: {why}", file=sys.stderr, flush=True)


def written(folder: Path) -> str:
    """Which files of a run are there, in a line."""
    names = ("metrics.jsonl", "loss.png", "checkpoints")
    return f"written: {', '.join(str(folder / name) for name in names if (folder / name).exists())}"


def plot_loss(folder: Path) -> None:
    """Draw the loss over the iterations into ``loss.png``, or say why not."""
    entries = read_metrics(folder / "metrics.jsonl")
    curve = Line("training", tuple((one["iteration"], one["lm_loss"]) for one in entries), True)
    try:
        drawn = lines("lm loss, nats per byte, lower is better", "iteration", [curve], whole=True)
        draw([drawn], f"{folder.name}: loss over the training", folder / "loss.png")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        print(f"{folder / 'loss.png'} was not drawn: {why}", flush=True)


@dataclass(frozen=True)
class Speed:
    """Of the iterations of a run after the first :data:`WARM_UP_ITERATIONS`.

    Attributes:
        seconds: wall time per iteration, mean over the ranks: lower quartile, median, upper one.
        blocked: the median, mean over the same ranks, of what of it they were blocked in tensor-
            and context-parallel communication (``exposed_time``); ``None``: not measured.
        tokens: per iteration, over all ranks.
        first, last: the iterations that count.
        link: what the ranks were connected by.
    """

    seconds: Range
    blocked: float | None
    tokens: int
    first: int
    last: int
    link: str

    def __str__(self) -> str:
        fast, middle, slow = self.seconds
        blocked = (
            f"of which {self.blocked:.3f} s blocked in communication; " if self.blocked else ""
        )
        return (
            f"{self.tokens / middle:.0f} over {self.link} ({middle:.3f} s per iteration, quartiles "
            f"{fast:.3f} and {slow:.3f}, {blocked}"
            f"medians of iterations {self.first} to {self.last})"
        )


def speed_of(entries: Sequence[dict[str, Any]], tokens: int, rate: float | None) -> Speed | None:
    """The speed of a run with these entries of ``metrics.jsonl``; ``None`` if all were warm-up.

    Args:
        entries: one per iteration of this process, in order.
        tokens: per iteration, over all ranks.
        rate: of ``--link-rate``, in megabytes per second.
    """
    counted = entries[WARM_UP_ITERATIONS:]
    if not counted:
        return None
    seconds = quartiles([entry["elapsed_ms"] / 1e3 for entry in counted])
    blocked = [entry["exposed_ms"] / 1e3 for entry in counted if entry["exposed_ms"] is not None]
    first, last = (counted[at]["iteration"] for at in (0, -1))
    link = "loopback" if rate is None else f"links of {rate:g} MB/s"
    return Speed(seconds, median(blocked) if blocked else None, tokens, first, last, link)


@dataclass
class Outcome:
    """How a training ended, on a rank.

    Attributes:
        losses: by iteration.
        weights_sha256: of all ranks' weights and optimizers.
        layers: what the layers say about themselves.
        stopped: by a signal, after ``iteration``.
        speed: ``None`` if no iteration came after the warm-up.
        error, code: why there is nothing of all that, and the exit code for it.
    """

    losses: dict[int, float] = field(default_factory=dict)
    weights_sha256: str = ""
    layers: list[str] = field(default_factory=list)
    stopped: bool = False
    iteration: int = 0
    speed: Speed | None = None
    error: str = ""
    code: int = 0
