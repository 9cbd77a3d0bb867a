"""The record of a rank during a run, and the comparison of two runs bit for bit.

Numbers are recorded in the format of :meth:`float.hex`, so that no bit is lost.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = [
    "Record",
    "degeneracies",
    "differences",
    "largest_loss_difference",
    "read_records",
    "weights_hash",
]

_SHOWN = 5


@dataclass
class Record:
    """The record of one rank in one run.

    Attributes:
        rank: global rank.
        losses: per iteration, the losses by name; empty except on the last pipeline stage.
        grad_norms: per iteration.
        weights_before, weights_after: a hash per parameter, before the first iteration and after
            the last.
        optimizer_after: a hash of the optimizer's state after the last iteration.
        collectives: number of calls, by ``group: function``.
        pairs: number of forwards that ran beside a backward.
        calls: ``(layer, path, count)`` of CommFuse's layers; empty without CommFuse.
    """

    rank: int
    losses: list[dict[str, str]] = field(default_factory=list)
    grad_norms: list[str | None] = field(default_factory=list)
    weights_before: dict[str, str] = field(default_factory=dict)
    weights_after: dict[str, str] = field(default_factory=dict)
    optimizer_after: str = ""
    collectives: dict[str, int] = field(default_factory=dict)
    pairs: int = 0
    calls: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def fused(self) -> set[str]:
        """What was fused at least once: linear layers, attention and others."""
        return {name for name, path, count in self.calls if path == "fused" and count}

    def write(self, folder: Path) -> None:
        (folder / f"rank_{self.rank}.json").write_text(json.dumps(asdict(self)), "utf-8")


def read_records(folder: Path) -> list[Record]:
    """The records of a run, by rank."""
    records = [Record(**json.loads(path.read_text("utf-8"))) for path in folder.glob("rank_*.json")]
    return sorted(records, key=lambda record: record.rank)


def weights_hash(records: Sequence[Record]) -> str:
    """One hash of the final weights and optimizers of all ranks, as ``hash_over_ranks`` has it."""
    bits = "".join(f"{sorted(r.weights_after.items())} {r.optimizer_after}" for r in records)
    return hashlib.sha256(bits.encode()).hexdigest()


def differences(reference: Sequence[Record], commfuse: Sequence[Record]) -> list[str]:
    """What differs between the two runs, bit for bit; empty if nothing does."""
    if len(reference) != len(commfuse):
        return [f"{len(reference)} ranks against {len(commfuse)}"]
    pairs = zip(reference, commfuse, strict=True)
    return [f"rank {a.rank}: {difference}" for a, b in pairs for difference in _of_rank(a, b)]


def _of_rank(reference: Record, other: Record) -> Iterator[str]:
    yield from _weights(reference.weights_before, other.weights_before, "before the training")
    for name, left, right in (
        ("losses", reference.losses, other.losses),
        ("gradient norms", reference.grad_norms, other.grad_norms),
    ):
        if left != right:
            rows = zip(left, right, strict=False)
            first = next((i for i, (a, b) in enumerate(rows, 1) if a != b), None)
            place = f"from iteration {first} on" if first else f"{len(left)} and {len(right)} of it"
            yield f"{name} differ, {place}"
    yield from _weights(reference.weights_after, other.weights_after, "after the training")
    if reference.optimizer_after != other.optimizer_after:
        yield "the optimizer's state (fp32 weights, moments) differs after the training"


def _weights(reference: dict[str, str], other: dict[str, str], when: str) -> Iterator[str]:
    names = [name for name in reference | other if reference.get(name) != other.get(name)]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"weights differ {when}: {', '.join(names[:_SHOWN])}{more}"


def largest_loss_difference(reference: Sequence[Record], commfuse: Sequence[Record]) -> float:
    """The largest relative difference over all iterations; infinite if there are no losses."""
    deviations = [
        _relative_difference([step.get(name) for step in a.losses], [s.get(name) for s in b.losses])
        for a, b in zip(reference, commfuse, strict=True)
        for name in dict.fromkeys(name for step in a.losses for name in step)
    ]
    return max(deviations, default=math.inf)


def _relative_difference(reference: Sequence[str | None], other: Sequence[str | None]) -> float:
    """The largest difference of two columns of numbers, relative to the first column."""
    if len(reference) != len(other) or [a is None for a in reference] != [b is None for b in other]:
        return math.inf
    numbers = [
        (float.fromhex(a), float.fromhex(b))
        for a, b in zip(reference, other, strict=True)
        if a and b
    ]
    relative = [abs(a - b) / abs(a) if a else abs(b) for a, b in numbers]
    return math.inf if any(map(math.isnan, relative)) else max(relative, default=0.0)


def degeneracies(records: Sequence[Record]) -> list[str]:
    """Why a run would prove nothing even if another run were equal to it."""
    problems = []
    losses = [float.fromhex(v) for r in records for step in r.losses for v in step.values()]
    if not losses:
        problems.append("no loss was noted")
    elif not all(map(math.isfinite, losses)):
        problems.append("a loss is not finite")
    norms = [float.fromhex(norm) for r in records for norm in r.grad_norms if norm is not None]
    if norms and not any(norms):
        problems.append("all gradient norms are 0")
    elif not all(map(math.isfinite, norms)):
        problems.append("a gradient norm is not finite")
    unchanged = [r.rank for r in records if r.weights_before == r.weights_after]
    if unchanged:
        problems.append(f"no weight changed on rank {', '.join(map(str, unchanged))}")
    return problems
