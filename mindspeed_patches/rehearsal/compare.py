"""Whether two runs gave the same bits, and whether that says anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mindspeed_patches.rehearsal.collectives import Kind
from mindspeed_patches.rehearsal.records import Record

__all__ = [
    "count_collectives",
    "degeneracies",
    "differences",
    "fused_paths",
    "gathers_and_scatters",
    "largest_loss_difference",
    "relative_difference",
]

_SHOWN = 5


def differences(reference: Sequence[Record], commfuse: Sequence[Record]) -> list[str]:
    """What is not the same in both runs, bit for bit; empty if all is."""
    if len(reference) != len(commfuse):
        return [f"{len(reference)} ranks against {len(commfuse)}"]
    found: list[str] = []
    for one, other in zip(reference, commfuse, strict=True):
        found += [f"rank {one.rank}: {what}" for what in _differences_of_rank(one, other)]
    return found


def _differences_of_rank(one: Record, other: Record) -> list[str]:
    found = _differing_weights(one.weights_before, other.weights_before, "before the training")
    for what, left, right in (
        ("losses", one.losses, other.losses),
        ("gradient norms", one.grad_norms, other.grad_norms),
    ):
        if left != right:
            rows = zip(left, right, strict=False)
            first = next((i for i, (a, b) in enumerate(rows, 1) if a != b), None)
            where = f"from iteration {first} on" if first else f"{len(left)} and {len(right)} of it"
            found.append(f"{what} differ, {where}")
    found += _differing_weights(one.weights_after, other.weights_after, "after the training")
    if one.optimizer_after != other.optimizer_after:
        found.append("the optimizer's state (fp32 weights, moments) differs after the training")
    return found


def largest_loss_difference(reference: Sequence[Record], commfuse: Sequence[Record]) -> float:
    """Relative, over all iterations; infinite if there is nothing to compare."""
    found = [
        relative_difference([step.get(name) for step in one.losses], [s.get(name) for s in losses])
        for one, other in zip(reference, commfuse, strict=True)
        for losses in [other.losses]
        for name in dict.fromkeys(name for step in one.losses for name in step)
    ]
    return max(found, default=math.inf)


def relative_difference(one: Sequence[str | None], other: Sequence[str | None]) -> float:
    """The largest difference of two columns of numbers, relative to the first column."""
    if len(one) != len(other) or [a is None for a in one] != [b is None for b in other]:
        return math.inf
    numbers = [
        (float.fromhex(a), float.fromhex(b)) for a, b in zip(one, other, strict=True) if a and b
    ]
    relative = [abs(a - b) / abs(a) if a else abs(b) for a, b in numbers]
    return math.inf if any(map(math.isnan, relative)) else max(relative, default=0.0)


def _differing_weights(one: dict[str, str], other: dict[str, str], when: str) -> list[str]:
    names = [name for name in one | other if one.get(name) != other.get(name)]
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"weights differ {when}: {', '.join(names[:_SHOWN])}{more}"]


def degeneracies(records: Sequence[Record]) -> list[str]:
    """Why a run proves nothing, even if another one is equal to it."""
    found = []
    losses = [float.fromhex(v) for r in records for step in r.losses for v in step.values()]
    if not losses:
        found.append("no loss was noted")
    elif not all(map(math.isfinite, losses)):
        found.append("a loss is not finite")
    norms = [float.fromhex(norm) for r in records for norm in r.grad_norms if norm is not None]
    if norms and not any(norms):
        found.append("all gradient norms are 0")
    elif not all(map(math.isfinite, norms)):
        found.append("a gradient norm is not finite")
    still = [r.rank for r in records if r.weights_before == r.weights_after]
    if still:
        found.append(f"no weight changed on rank {', '.join(map(str, still))}")
    return found


def count_collectives(records: Sequence[Record]) -> Counter[Kind]:
    """Calls, over all ranks."""
    counts: Counter[Kind] = Counter()
    for record in records:
        for group, operation, count in record.collectives:
            counts[Kind(group, operation)] += count
    return counts


def gathers_and_scatters(records: Sequence[Record], group: str) -> int:
    """How many all-gathers and reduce-scatters of tensors ran on groups whose names begin so."""
    return sum(
        count
        for kind, count in count_collectives(records).items()
        if kind.group.startswith(group)
        and kind.operation.lstrip("_").startswith(("reduce_scatter", "all_gather"))
        and not kind.operation.endswith("_object")
    )


def fused_paths(records: Sequence[Record]) -> set[str]:
    """What took CommFuse's path at least once: linear layers, attention and others, by name."""
    return {name for r in records for name, path, count in r.calls if path == "fused" and count}
