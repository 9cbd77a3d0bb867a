"""What a rehearsal prints, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mindspeed_patches.rehearsal.collectives import Site
from mindspeed_patches.rehearsal.compare import (
    LAYER_NAMES,
    bucket_collectives,
    collectives_in,
    count_collectives,
    fused_layers,
    is_comparison,
    is_message,
    relative_difference,
)
from mindspeed_patches.rehearsal.records import Record

__all__ = [
    "collective_lines",
    "feature_lines",
    "hash_lines",
    "layer_lines",
    "loss_lines",
    "plan_lines",
]

Runs = Mapping[str, Sequence[Record]]

_LINEAR = ("ParallelLinear", "tensor_parallel.layers", "tensor_parallel.mappings")


def feature_lines(runs: Runs, verbose: bool) -> list[str]:
    """Features and patches of rank 0; those that only one run has are marked."""
    firsts = {way: records[0] for way, records in runs.items()}
    lines = ["MindSpeed features that were applied:"]
    names = list(dict.fromkeys(name for record in firsts.values() for name in record.features))
    shared = [n for n in names if all(n in record.features for record in firsts.values())]
    lines.append(f"  {', '.join(shared)}")
    for way, record in firsts.items():
        own = [name for name in record.features if name not in shared]
        if own:
            lines.append(f"  {way} run only: {', '.join(own)}")
    lines.append("patches on all functions:" if verbose else "patches on the linear layers:")
    paths = dict.fromkeys(path for record in firsts.values() for path in record.patches)
    for path in paths:
        if verbose or any(part in path for part in _LINEAR):
            for way, record in firsts.items():
                if path in record.patches and way == _first_with(firsts, path):
                    by = ", ".join(record.patches[path]) or "(nothing)"
                    only = "" if all(path in r.patches for r in firsts.values()) else f" [{way}]"
                    lines.append(f"  {path}{only}\n    by {by}")
    return lines


def _first_with(firsts: Mapping[str, Record], path: str) -> str:
    return next(way for way, record in firsts.items() if path in record.patches)


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


def plan_lines(records: Sequence[Record]) -> list[str]:
    """The programs of rank 0, with the layers that use them."""
    users = {
        "gather": "forward of qkv, fc1, output; backward of proj, fc2; weight gradients",
        "reduce_scatter": "forward of proj, fc2; backward of qkv, fc1, output",
    }
    lines = []
    for kind, drawing in records[0].plans.items():
        lines.append(f"program of {users.get(kind, kind)}:")
        lines += [f"  {line}" for line in drawing.splitlines()]
    return lines


def collective_lines(runs: Runs) -> list[str]:
    """Collectives during training by their call sites, a column per run."""
    counts = {way: count_collectives(records) for way, records in runs.items()}
    sites = sorted({site for counter in counts.values() for site in counter})
    iterations = len(next(iter(runs.values()))[0].grad_norms)
    ranks = len(next(iter(runs.values())))
    head = f"collectives during {iterations} iterations, {ranks} ranks together"
    lines = [_row(head, list(runs))]

    def rows(chosen: Sequence[Site], label: str = "{0.where}  {0.operation} ({0.group})") -> None:
        for site in chosen:
            lines.append(_row("  " + label.format(site), [c[site] for c in counts.values()]))

    messages = [site for site in sites if is_message(site)]
    checks = [site for site in sites if is_comparison(site)]
    others = [site for site in sites if site not in messages and site not in checks]
    lines.append("in the linear layers")
    rows([s for s in others if s.layer], "{0.layer:<13} {0.where}  {0.operation} ({0.group})")
    fused = fused_layers(runs["commfuse"]) if "commfuse" in runs else list(LAYER_NAMES.values())
    left = [collectives_in(records, fused) for records in runs.values()]
    lines.append(_row(f"left in the fused layers ({', '.join(fused) or 'none'})", left))
    of_buckets = [bucket_collectives(records) for records in runs.values()]
    if any(of_buckets):
        lines.append(_row("of buckets of gradients and parameters", of_buckets))
    for group, title in ((True, "elsewhere on the tensor-parallel group"), (False, "elsewhere")):
        chosen = [s for s in others if not s.layer and (s.group == "tensor") is group]
        if chosen:
            lines.append(title)
            rows(chosen)
    sent = [sum(c[site] for site in messages) for c in counts.values()]
    lines.append(_row("peer-to-peer messages sent", sent))
    compared = [sum(c[site] for site in checks) for c in counts.values()]
    told = "comparisons of the ranks, once per kind of operation, and meetings before a step"
    lines.append(_row(told, compared))
    return lines


def _row(label: str, values: Sequence[object]) -> str:
    return f"{label:<112} " + " ".join(f"{value!s:>10}" for value in values)


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
