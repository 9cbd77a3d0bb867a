"""What a run leaves behind to look at: metrics.jsonl, one object per line, and loss.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from commfuse_npu.tools.report.charts import Line, lines
from commfuse_npu.tools.report.drawing import draw

__all__ = ["MetricsLog", "plot_loss", "read_metrics", "written"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete entries of a metrics file; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    entries = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines):
                raise
    return entries


class MetricsLog:
    """Appends entries to `path`; each is on disk as far as the kernel is concerned at once.

    `keep_until` is the iteration from which a resumed run goes on: entries beyond it were written
    by work that was lost with the process, and are dropped, since they are about to be repeated.
    """

    def __init__(self, path: Path, *, keep_until: int) -> None:
        kept = [entry for entry in read_metrics(path) if entry["iteration"] <= keep_until]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(map(_line, kept)), encoding="utf-8")
        partial.replace(path)
        self._path = path
        self._failed = False

    def append(self, entry: dict[str, Any]) -> None:
        """Add one entry; `entry["iteration"]` is required.

        What cannot be written (a full disk) is said once, and the training goes on without.
        """
        if self._failed:
            return  # behind half a line nobody could read the rest
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))
        except OSError as error:
            self._failed = True
            print(
                f"cpu_pretraining: {self._path} cannot be written any more: {error.strerror}; the "
                "training goes on",
                file=sys.stderr,
                flush=True,
            )


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def written(folder: Path) -> str:
    """Which files of a run are there, in a line."""
    names = ("metrics.jsonl", "loss.png", "checkpoints")
    return f"written: {', '.join(str(folder / name) for name in names if (folder / name).exists())}"


def plot_loss(metrics: Path, picture: Path) -> str | None:
    """Draw training and validation loss over the iterations into `picture`.

    Returns None, or a sentence why there is no picture (no vl-convert-python, no room on the disk).
    """
    entries = read_metrics(metrics)
    shown = []
    for key, name in (("lm_loss", "training"), ("validation_loss", "validation")):
        points = tuple((entry["iteration"], entry[key]) for entry in entries if key in entry)
        if points:
            shown.append(Line(name, points, key == "lm_loss"))
    title = "lm loss, nats per byte, lower is better"
    try:
        drawn = lines(title, "iteration", shown, whole=True)
        draw([drawn], f"{metrics.parent.name}: loss over the training", picture)
    except OSError as error:
        return f"{picture} was not drawn: {error.strerror}"
    except ValueError as error:
        return f"{picture.name} was not drawn: {error}"
    return None
