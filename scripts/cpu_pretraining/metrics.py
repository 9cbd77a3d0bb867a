"""What a run leaves behind to look at: metrics.jsonl, one object per line, and loss.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.whole_file import whole_file

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

    Returns None, or a sentence why there is no picture (no matplotlib, no room on the disk).
    """
    try:
        import matplotlib
    except ImportError:
        return f"matplotlib is not installed, so {picture.name} was not drawn"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = read_metrics(metrics)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for key, label, style in (
        ("lm_loss", "training", "-"),
        ("validation_loss", "validation", "o--"),
    ):
        points = [(entry["iteration"], entry[key]) for entry in entries if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set_xlabel("iteration")
    axes.set_ylabel("lm loss (nats per byte)")
    axes.grid(True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.tight_layout()
    try:
        with whole_file(picture) as part:
            figure.savefig(part, dpi=120)
    except OSError as error:
        return f"{picture} was not drawn: {error.strerror}"
    finally:
        pyplot.close(figure)
    return None
