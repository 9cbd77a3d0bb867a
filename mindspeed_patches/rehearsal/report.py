"""The report of a rehearsal, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_patches.rehearsal.records import Record, relative_difference

__all__ = ["report_lines"]

Runs = Mapping[str, Sequence[Record]]


def report_lines(runs: Runs) -> Iterator[str]:
    """Versions, features, layers, collectives, losses and hashes of the runs, by their names."""
    first = next(iter(runs.values()))[0]
    yield ", ".join(f"{name} {version}" for name, version in first.versions.items())
    for part in (_features, _layers, _collectives, _losses, _hashes):
        yield ""
        yield from part(runs)
    yield ""


def _features(runs: Runs) -> Iterator[str]:
    """Features of rank 0, with those that only one run has listed separately."""
    features = {way: records[0].features for way, records in runs.items()}
    shared = [
        name for name in next(iter(features.values())) if all(name in n for n in features.values())
    ]
    yield "MindSpeed features that were applied:"
    yield f"  {', '.join(shared)}"
    for way, names in features.items():
        if extra := [name for name in names if name not in shared]:
            yield f"  {way} run only: {', '.join(extra)}"


def _layers(runs: Runs) -> Iterator[str]:
    """Numbers of fused and unfused calls per layer, over all ranks."""
    if (records := runs.get("commfuse")) is None:
        return
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
    records = next(iter(runs.values()))
    head = (
        f"collectives and messages during {len(records[0].grad_norms)} iterations, "
        f"{len(records)} ranks together"
    )
    yield _row(head, list(runs))
    for kind in sorted(set().union(*counts)):
        yield _row(f"  {kind}", [count[kind] for count in counts])


def _row(label: str, values: Sequence[object]) -> str:
    return f"{label:<76} " + " ".join(f"{value!s:>10}" for value in values)


def _losses(runs: Runs) -> Iterator[str]:
    """Losses and gradient norms with all their digits, side by side."""
    samples = [
        next((record for record in records if any(record.losses)), records[0])
        for records in runs.values()
    ]
    columns = {
        "loss": [[next(iter(step.values()), None) for step in r.losses] for r in samples],
        "gradient norm": [r.grad_norms for r in samples],
    }
    head = " ".join(f"{f'{name}, {way}':>28}" for name in columns for way in runs)
    yield f"{'iteration':>9} {head}"
    for index in range(len(samples[0].grad_norms)):
        cells = [[column[index] for column in series] for series in columns.values()]
        row = " ".join(f"{_decimal(value):>28}" for values in cells for value in values)
        equal = all(len(set(values)) == 1 for values in cells)
        yield f"{index + 1:>9} {row}{'' if equal else '  differs'}"
    for name, series in columns.items():
        if len(series) == 2:
            yield f"largest difference of the {name}: {relative_difference(*series):.3g} relative"


def _decimal(text: str | None) -> str:
    # repr has enough digits to distinguish any two numbers.
    return "-" if text is None else repr(float.fromhex(text))


def _hashes(runs: Runs) -> Iterator[str]:
    """SHA-256 over the weights and over the optimizer's state of each rank."""
    for ranks in zip(*runs.values(), strict=True):
        yield f"rank {ranks[0].rank} ({ranks[0].layout})"
        for way, record in zip(runs, ranks, strict=True):
            yield f"  {way:<10} weights   {record.weights_hash}"
        for way, record in zip(runs, ranks, strict=True):
            yield f"  {way:<10} optimizer {record.optimizer_after}"
