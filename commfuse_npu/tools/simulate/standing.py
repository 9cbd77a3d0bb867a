"""Who is who among the variants: ours, what a user has today, rivals that exist, ideal bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from commfuse_npu.tools.simulate.sweep import Outcome, Point
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant

__all__ = ["Standing", "change", "of", "outcome", "role", "seconds", "verdict"]

Role = Literal["ours", "today", "rival", "bound", "plain"]


def role(variant: Variant) -> Role:
    """What a variant is to somebody who chooses.

    Nobody can launch an ideal kernel, nor CoC with the fastest slices for each operation.
    """
    if variant.kind in ("fused", "flow"):
        return "ours"
    if variant.kind == "megatron":
        return "today"
    if variant.kind == "ideal" or (variant.kind == "sliced" and variant.tuned):
        return "bound"
    return "rival" if variant.kind in ("sliced", "coc_fused", "mc2") else "plain"


@dataclass(frozen=True)
class Standing:
    """Names of the shortest steps over all points, by what they are; ``None`` without any.

    Attributes:
        ours: among schedules that round as Megatron does, if there are any.
        rival: among those that exist besides Megatron's order.
        best: the shorter of that and Megatron's order.
        roles: of all variants.
    """

    ours: str | None
    today: str | None
    rival: str | None
    best: str | None
    bound: str | None
    roles: Mapping[str, Role]

    def shown(self, names: Sequence[str], everything: bool) -> list[str]:
        """Of these names the five that a reader needs first, in their order, or all of them."""
        if everything:
            return list(names)
        kept = {REFERENCE.name, self.today, self.rival, self.ours, self.bound}
        return [name for name in names if name in kept]


def of(points: Sequence[Point], known: Mapping[str, Variant]) -> Standing:
    """By the sum over the points of a step in that of the reference."""
    scores: dict[str, float] = {}
    for point in points:
        plain = point.outcomes[0].step.typical
        for one in point.outcomes:
            scores[one.variant] = scores.get(one.variant, 0.0) + one.step.typical / plain
    roles = {name: role(known[name]) for name in scores}

    def best(*wanted: Role) -> str | None:
        return min((n for n in scores if roles[n] in wanted), key=scores.__getitem__, default=None)

    alike = [
        name
        for name in scores
        if (known[name].kind, known[name].wgrad, known[name].sums) == ("fused", "whole", "ordered")
    ]
    ours = min(alike, key=scores.__getitem__, default=best("ours"))
    rivals = best("rival"), best("today", "rival")
    return Standing(ours, best("today"), *rivals, best("bound"), roles)


def outcome(point: Point, name: str) -> Outcome:
    """That of a variant."""
    return next(one for one in point.outcomes if one.variant == name)


def verdict(points: Sequence[Point], standing: Standing, options: Sequence[str]) -> list[str]:
    """Two lines: the best schedule of ours and its options, and how it compares.

    Args:
        options: of a launch with that schedule.
    """
    ours = standing.ours
    bound = ""
    if standing.bound is not None:
        bound = (
            f" Ideal bound, which nobody can launch: {standing.bound}, "
            f"{_steps(standing.bound, points)}."
        )
    if ours is None:
        first = min(points[0].outcomes, key=lambda one: one.step.typical).variant
        return [
            f"Nothing of ours was simulated: --variants 'commfuse-*' would. Shortest step: "
            f"{first}, {_steps(first, points)}.",
            f"Nothing to compare.{bound}",
        ]
    mine = [outcome(point, ours).step.typical for point in points]

    def against(name: str) -> str:
        theirs = [outcome(point, name).step.typical for point in points]
        return change([one / other - 1 for one, other in zip(mine, theirs, strict=True)])

    said = []
    if standing.today is not None and standing.today != standing.best:
        today = _steps(standing.today, points)
        said.append(f"{against(standing.today)} Megatron's order, {today}")
    if standing.best is not None:
        name = f"{standing.best}, the best rival that exists"
        if standing.best == standing.today:
            name = "Megatron's order, which is the best rival that exists"
        said.append(f"{against(standing.best)} {name}, {_steps(standing.best, points)}")
    if not said:
        said = [f"{against(REFERENCE.name)} plain collectives"]
    compared = "; ".join(said)
    return [
        f"Best of ours: **{ours}**, a step in {_steps(ours, points)}: `{' '.join(options)}`",
        f"{compared[0].upper()}{compared[1:]}.{bound}",
    ]


def change(shares: Sequence[float]) -> str:
    """``8.7 % shorter than``; over several points from the worst to the best."""
    worst, best = max(shares), min(shares)

    def said(share: float) -> str:
        return f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'}".replace("%", " %")

    if said(worst) == said(best):
        return f"{said(worst)} than"
    return f"from {said(worst)} to {said(best)} than"


def seconds(value: float) -> str:
    """``22.13 s``, ``940.1 ms``."""
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.1f} ms"


def _steps(name: str, points: Sequence[Point]) -> str:
    """``22.13 s (15.34 s .. 36.17 s)``, of several points ``11.02 s to 22.13 s``."""
    found = [outcome(point, name).step for point in points]
    if len(found) == 1:
        (low, typical, high) = found[0]
        said = "" if low == high else f" ({seconds(low)} .. {seconds(high)})"
        return seconds(typical) + said
    typical_ones = [one.typical for one in found]
    return f"{seconds(min(typical_ones))} to {seconds(max(typical_ones))}"
