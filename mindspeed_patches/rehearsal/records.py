"""What a rank notes during a run, as a file that another process reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Record", "read_records"]


@dataclass
class Record:
    """One rank of one run.

    Numbers are noted as :meth:`float.hex` writes them, so that no bit is lost.

    Attributes:
        rank: global rank.
        finished: the script ended by itself.
        versions: of the packages in use, by name.
        layout: this rank's place in the parallel groups (``tp 0/2``).
        losses: per iteration, the losses by name; empty but on the last pipeline stage.
        grad_norms: per iteration.
        weights_before: a hash per parameter, before the first iteration.
        weights_after: the same after the last.
        optimizer_after: a hash of the optimizer's state after the last iteration.
        features: names of MindSpeed's features that were applied.
        collectives: ``[group, operation, count]``.
        pairs: how many forwards ran beside a backward.
        calls: ``[layer, path, count]`` of CommFuse's layers; empty without CommFuse.
    """

    rank: int
    finished: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    layout: str = ""
    losses: list[dict[str, str]] = field(default_factory=list)
    grad_norms: list[str | None] = field(default_factory=list)
    weights_before: dict[str, str] = field(default_factory=dict)
    weights_after: dict[str, str] = field(default_factory=dict)
    optimizer_after: str = ""
    features: list[str] = field(default_factory=list)
    collectives: list[tuple[str, str, int]] = field(default_factory=list)
    pairs: int = 0
    calls: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def weights_hash(self) -> str:
        """One hash for all parameters and their names, after the last iteration."""
        return hashlib.sha256(repr(sorted(self.weights_after.items())).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        (folder / f"rank_{self.rank}.json").write_text(json.dumps(asdict(self)), "utf-8")


def read_records(folder: Path) -> list[Record]:
    """The records of a run, by rank."""
    found = [_read(path) for path in folder.glob("rank_*.json")]
    return sorted(found, key=lambda record: record.rank)


def _read(path: Path) -> Record:
    values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for name in ("collectives", "calls"):
        values[name] = [tuple(row) for row in values[name]]
    return Record(**values)
