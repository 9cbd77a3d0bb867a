"""The report of a rehearsal, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_patches.rehearsal.records import Record, weights_hash

__all__ = ["report_lines"]

Runs = Mapping[str, Sequence[Record]]


def report_lines(runs: Runs) -> Iterator[str]:
    """Layers, collectives and hashes of the runs, by their names."""
    for part in (_layers, _collectives, _hashes):
        yield ""
        yield from part(runs)
    yield ""


def _layers(runs: Runs) -> Iterator[str]:
    """Numbers of fused and unfused calls per layer, over all ranks."""
    records = runs["commfuse"]
    calls: Counter[tuple[str, str]] = Counter()
    for record in records:
        for layer, path, count in record.calls:
            calls[layer, path] += count
    yield f"CommFuse's calls in its run, forward, {len(records)} ranks together:"
    for (layer, path), count in sorted(calls.items()):
        text = "fused" if path == "fused" else f"by Megatron, because {path}"
        yield f"  {layer:<10} {count:>6}  {text}"
    if not calls:
        yield "  none went through CommFuse's wrappers"


def _collectives(runs: Runs) -> Iterator[str]:
    """Collectives and messages during training by group, with a column per run."""
    counts = [
        sum((Counter(r.collectives) for r in records), Counter()) for records in runs.values()
    ]
    records = runs["reference"]
    head = (
        f"collectives and messages during {len(records[0].grad_norms)} iterations, "
        f"{len(records)} ranks together"
    )
    yield _row(head, list(runs))
    for kind in sorted(set().union(*counts)):
        yield _row(f"  {kind}", [count[kind] for count in counts])


def _row(label: str, values: Sequence[object]) -> str:
    return f"{label:<76} " + " ".join(f"{value!s:>10}" for value in values)


def _hashes(runs: Runs) -> Iterator[str]:
    """One SHA-256 per run."""
    for way, records in runs.items():
        yield f"sha256 of all weights and optimizers, {way}: {weights_hash(records)}"
