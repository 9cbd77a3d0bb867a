"""The record of a rank during a run, and the comparison of two runs bit for bit.

Numbers are recorded in the format of :meth:`float.hex`, so that no bit is lost.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

NORM = "gradient norm"
"""The name of a number that is not a loss."""
_SHOWN = 5


@dataclass
class Record:
    """The record of one rank in one run.

    Attributes:
        numbers: losses and gradient norms by ``iteration 1, lm loss``; losses are on the last
            pipeline stage only.
        before, after: a hash per parameter before the first iteration, and after the last, then
            also one of the optimizer's state.
        collectives: number of calls, by ``group: function``.
        overlapped: number of passes that took turns, or of weight gradients that waited.
        calls: ``(layer, path, count)`` of CommFuse's layers; empty without CommFuse.
    """

    rank: int
    iterations: int = 0
    numbers: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    overlapped: int = 0
    calls: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def fused(self) -> set[str]:
        """What was fused at least once: linear layers, attention and others."""
        return {name for name, path, count in self.calls if path == "fused" and count}

    @property
    def losses(self) -> dict[str, str]:
        """The numbers without the gradient norms."""
        return {name: value for name, value in self.numbers.items() if not name.endswith(NORM)}

    def write(self, folder: Path) -> None:
        (folder / f"rank_{self.rank}.json").write_text(json.dumps(asdict(self)), "utf-8")


def read_records(folder: Path) -> list[Record]:
    """The records of a run, by rank."""
    records = [Record(**json.loads(path.read_text("utf-8"))) for path in folder.glob("rank_*.json")]
    return sorted(records, key=lambda record: record.rank)


def differences(reference: Sequence[Record], commfuse: Sequence[Record]) -> list[str]:
    """What differs between the two runs, bit for bit; empty if nothing does."""
    if len(reference) != len(commfuse):
        return [f"{len(reference)} ranks against {len(commfuse)}"]
    lines = []
    for a, b in zip(reference, commfuse, strict=True):
        for when, left, right in (
            ("before", a.before, b.before),
            ("in", a.numbers, b.numbers),
            ("after", a.after, b.after),
        ):
            names = [name for name in left | right if left.get(name) != right.get(name)]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            if names:
                shown = "; ".join(names[:_SHOWN])
                lines.append(f"rank {a.rank} differs {when} the training: {shown}{more}")
    return lines


def largest_loss_difference(reference: Sequence[Record], commfuse: Sequence[Record]) -> float:
    """The largest relative difference over all iterations; infinite if losses are missing."""
    pairs = [(a.losses, b.losses) for a, b in zip(reference, commfuse, strict=True)]
    if any(a.keys() != b.keys() for a, b in pairs):
        return math.inf
    numbers = [(float.fromhex(a[name]), float.fromhex(b[name])) for a, b in pairs for name in a]
    relative = [abs(a - b) / abs(a) if a else abs(b) for a, b in numbers]
    return math.inf if any(map(math.isnan, relative)) else max(relative, default=math.inf)


def degeneracies(records: Sequence[Record]) -> list[str]:
    """Why a run would prove nothing even if another run were equal to it."""
    problems = []
    if not any(r.losses for r in records):
        problems.append("no loss was noted")
    if not all(math.isfinite(float.fromhex(v)) for r in records for v in r.numbers.values()):
        problems.append("a loss or a gradient norm is not finite")
    norms = [v for r in records for name, v in r.numbers.items() if name.endswith(NORM)]
    if norms and not any(map(float.fromhex, norms)):
        problems.append("all gradient norms are 0")
    unchanged = [str(r.rank) for r in records if r.before.items() <= r.after.items()]
    if unchanged:
        problems.append(f"no weight changed on rank {', '.join(unchanged)}")
    return problems


def report_lines(runs: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """Layers, collectives and hashes of the runs, by their names; over all ranks."""
    calls: Counter[tuple[str, str]] = Counter()
    for record in runs["commfuse"]:
        for layer, path, count in record.calls:
            calls[layer, path] += count
    ranks = f"{len(runs['commfuse'])} ranks together"
    yield f"\nCommFuse's calls in its run, forward, {ranks}:"
    for (layer, path), count in sorted(calls.items()):
        text = "fused" if path == "fused" else f"by Megatron, because {path}"
        yield f"  {layer:<10} {count:>6}  {text}"
    if not calls:
        yield "  none went through CommFuse's wrappers"

    counts = [
        sum((Counter(r.collectives) for r in records), Counter()) for records in runs.values()
    ]
    iterations = runs["reference"][0].iterations
    head = f"collectives and messages during {iterations} iterations, {ranks}"
    yield f"\n{_row(head, list(runs))}"
    for kind in sorted(set().union(*counts)):
        yield _row(f"  {kind}", [count[kind] for count in counts])

    yield ""
    for way, records in runs.items():
        bits = "".join(str(sorted(record.after.items())) for record in records)
        digest = hashlib.sha256(bits.encode()).hexdigest()
        yield f"sha256 of all weights and optimizers, {way}: {digest}"
    yield ""


def _row(label: str, values: Sequence[object]) -> str:
    return f"{label:<76} " + " ".join(f"{value!s:>10}" for value in values)
