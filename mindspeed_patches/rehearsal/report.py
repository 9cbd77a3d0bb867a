"""The report of a rehearsal, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_patches.rehearsal.records import Record, weights_hash

__all__ = ["report_lines"]


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
        yield f"sha256 of all weights and optimizers, {way}: {weights_hash(records)}"
    yield ""


def _row(label: str, values: Sequence[object]) -> str:
    return f"{label:<76} " + " ".join(f"{value!s:>10}" for value in values)
