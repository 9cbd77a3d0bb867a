"""What a rehearsal prints, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mindspeed_patches.rehearsal.compare import count_collectives, relative_difference
from mindspeed_patches.rehearsal.records import Record

__all__ = ["collective_lines", "feature_lines", "hash_lines", "layer_lines", "loss_lines"]

Runs = Mapping[str, Sequence[Record]]


def feature_lines(runs: Runs) -> list[str]:
    """Features of rank 0; those that only one run has are marked."""
    firsts = {way: records[0] for way, records in runs.items()}
    lines = ["MindSpeed features that were applied:"]
    names = list(dict.fromkeys(name for record in firsts.values() for name in record.features))
    shared = [n for n in names if all(n in record.features for record in firsts.values())]
    lines.append(f"  {', '.join(shared)}")
    for way, record in firsts.items():
        own = [name for name in record.features if name not in shared]
        if own:
            lines.append(f"  {way} run only: {', '.join(own)}")
    return lines


def layer_lines(records: Sequence[Record]) -> list[str]:
    """Which layers are fused and which fell back, over all ranks."""
    calls: Counter[tuple[str, str]] = Counter()
    for record in records:
        for layer, path, count in record.calls:
            calls[layer, path] += count
    lines = [f"CommFuse's calls in its run, forward, {len(records)} ranks together:"]
    for (layer, path), count in sorted(calls.items()):
        told = "fused" if path == "fused" else f"by Megatron, because {path}"
        lines.append(f"  {layer:<10} {count:>6}  {told}")
    return lines if calls else [*lines, "  none went through CommFuse's wrappers"]


def collective_lines(runs: Runs) -> list[str]:
    """Collectives and messages during training by group, a column per run."""
    counts = {way: count_collectives(records) for way, records in runs.items()}
    iterations = len(next(iter(runs.values()))[0].grad_norms)
    ranks = len(next(iter(runs.values())))
    head = f"collectives and messages during {iterations} iterations, {ranks} ranks together"
    lines = [_row(head, list(runs))]
    for kind in sorted({kind for counter in counts.values() for kind in counter}):
        label = f"  {kind.group}: {kind.operation}"
        lines.append(_row(label, [counter[kind] for counter in counts.values()]))
    return lines


def _row(label: str, values: Sequence[object]) -> str:
    return f"{label:<76} " + " ".join(f"{value!s:>10}" for value in values)


def loss_lines(runs: Runs) -> list[str]:
    """Losses and gradient norms with all their digits, side by side."""
    lines = []
    columns = {
        way: next((record for record in records if any(record.losses)), records[0])
        for way, records in runs.items()
    }
    shown = next(iter(columns.values()))
    head = " ".join(f"{f'{name}, {way}':>28}" for name in ("loss", "grad norm") for way in columns)
    lines.append(f"{'iteration':>9} {head}")
    for index in range(len(shown.grad_norms)):
        losses = [_first_loss(record.losses[index]) for record in columns.values()]
        norms = [record.grad_norms[index] for record in columns.values()]
        row = " ".join(f"{_decimal(value):>28}" for value in (*losses, *norms))
        same = all(len(set(values)) == 1 for values in (losses, norms))
        lines.append(f"{index + 1:>9} {row}{'' if same else '  differs'}")
    if len(columns) == 2:
        one, other = columns.values()
        of_loss = relative_difference(
            *([_first_loss(step) for step in r.losses] for r in (one, other))
        )
        of_norm = relative_difference(one.grad_norms, other.grad_norms)
        lines.append(f"largest difference of the loss: {of_loss:.3g} relative")
        lines.append(f"largest difference of the gradient norm: {of_norm:.3g} relative")
    return lines


def _first_loss(losses: Mapping[str, str]) -> str | None:
    return next(iter(losses.values()), None)


def _decimal(text: str | None) -> str:
    # repr has every digit that tells two numbers apart.
    return "-" if text is None else repr(float.fromhex(text))


def hash_lines(runs: Runs) -> list[str]:
    """SHA-256 over the weights and over the optimizer's state of each rank."""
    lines = []
    for index, first in enumerate(next(iter(runs.values()))):
        lines.append(f"rank {first.rank} ({first.layout})")
        for way, records in runs.items():
            lines.append(f"  {way:<10} weights   {records[index].weights_hash}")
        for way, records in runs.items():
            lines.append(f"  {way:<10} optimizer {records[index].optimizer_after}")
    return lines
