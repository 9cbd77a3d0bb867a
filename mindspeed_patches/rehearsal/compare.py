"""Whether two runs gave the same bits, and whether that says anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from mindspeed_patches.rehearsal.collectives import Site
from mindspeed_patches.rehearsal.records import Record

__all__ = [
    "LAYER_NAMES",
    "bucket_collectives",
    "collectives_in",
    "count_collectives",
    "degeneracies",
    "differences",
    "fused_layers",
    "fused_paths",
    "is_comparison",
    "is_message",
    "largest_loss_difference",
    "relative_difference",
]

LAYER_NAMES = {
    "linear_qkv": "qkv",
    "linear_q_up_proj": "q_up",
    "linear_qk_nope": "q_up",
    "linear_qk_rope": "q_up",
    "linear_kv_up_proj": "kv_up",
    "linear_kv_nope": "kv_up",
    "linear_v": "kv_up",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "shared_experts.linear_fc1": "shared_fc1",
    "shared_experts.linear_fc2": "shared_fc2",
    "eh_proj": "eh_proj",
    "output_layer": "output",
}
"""CommFuse's names of the layers that Megatron's modules are."""

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


def count_collectives(records: Sequence[Record]) -> Counter[Site]:
    """Calls per site, over all ranks."""
    counts: Counter[Site] = Counter()
    for record in records:
        for *site, count in record.collectives:
            counts[Site(*site)] += count
    return counts


def fused_layers(records: Sequence[Record]) -> list[str]:
    """The linear layers that took CommFuse's path at least once, by CommFuse's names."""
    paths = fused_paths(records)
    return [name for name in dict.fromkeys(LAYER_NAMES.values()) if name in paths]


def fused_paths(records: Sequence[Record]) -> set[str]:
    """Everything that took CommFuse's path at least once: linear layers, attention and others."""
    return {name for r in records for name, path, count in r.calls if path == "fused" and count}


def is_message(site: Site) -> bool:
    """Whether it is a message from one rank to another and no collective."""
    return site.operation in ("send", "isend")


def is_comparison(site: Site) -> bool:
    """Whether it is CommFuse comparing the ranks: at a first time, or before a step."""
    return site.where.startswith("commfuse_npu.runtime.transport") and site.operation.endswith(
        "_object"
    )


def collectives_in(records: Sequence[Record], layers: Collection[str]) -> int:
    """How many collectives the given layers issued, on any group.

    A collective that CommFuse's own code issues for no known layer counts too.
    """
    return sum(
        count
        for site, count in count_collectives(records).items()
        if not (is_message(site) or is_comparison(site))
        and (LAYER_NAMES.get(site.layer) in layers or site.where.startswith("commfuse_npu"))
    )


def bucket_collectives(records: Sequence[Record]) -> int:
    """How many collectives were issued for buckets of gradients and of parameters.

    They are told by their group: gathers that overlap the forward are issued within its layers.
    """
    return sum(
        count
        for site, count in count_collectives(records).items()
        if site.group.startswith("data parallel")
        and site.operation.lstrip("_").startswith(("reduce_scatter", "all_gather"))
    )
