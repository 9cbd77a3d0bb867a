"""Who is who among the variants: ours, what a user has today, rivals that exist, ideal bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from commfuse_npu.tools.simulate.sweep import Outcome, Point
from commfuse_npu.tools.simulate.variants import CATCCOS, IDEAL, REFERENCE, Variant

__all__ = ["Standing", "change", "of", "outcome", "role", "seconds", "verdict"]

Role = Literal["ours", "today", "rival", "bound", "plain"]


def role(variant: Variant) -> Role:
    """What a variant is to somebody who chooses.

    Nobody can launch an ideal kernel, catccos in MindSpeed-LLM, nor CoC with the fastest slices for
    each operation.
    """
    if variant.ours:
        return "ours"
    if variant.kind == "megatron":
        return "today"
    if variant in (IDEAL, CATCCOS) or (variant.kind == "sliced" and variant.tuned):
        return "bound"
    return "rival" if variant.kind in ("sliced", "kernel", "mc2") else "plain"


@dataclass(frozen=True)
class Standing:
    """Names of the shortest steps over all points, by what they are; ``None`` without any.

    Attributes:
        ours: of this project, whatever its rounding.
        alike: of those, among what has Megatron's bits.
        rival: among those that exist besides Megatron's order.
        best: the shorter of that and Megatron's order.
        roles: of all variants.
        other_rounding: see :attr:`~.variants.Variant.other_rounding`; of ``ours``.
    """

    ours: str | None
    alike: str | None
    today: str | None
    rival: str | None
    best: str | None
    bound: str | None
    roles: Mapping[str, Role]
    other_rounding: str

    @property
    def compared(self) -> list[str]:
        """Plain, Megatron's order, and ours."""
        found = (REFERENCE.name, self.today, self.alike, self.ours)
        return list(dict.fromkeys(name for name in found if name is not None))

    def shown(self, names: Sequence[str], everything: bool) -> list[str]:
        """Of these names those that a reader needs first, in their order, or all of them."""
        if everything:
            return list(names)
        kept = {*self.compared, self.rival, self.bound}
        return [name for name in names if name in kept]


def of(points: Sequence[Point], known: Mapping[str, Variant]) -> Standing:
    """By the sum over the points of a step in that of the reference."""
    scores: dict[str, float] = {}
    for point in points:
        plain = point.outcomes[0].step.typical
        for one in point.outcomes:
            scores[one.variant] = scores.get(one.variant, 0.0) + one.step.typical / plain
    roles = {name: role(known[name]) for name in scores}

    def best(*wanted: Role, alike: bool = False) -> str | None:
        names = (n for n in scores if roles[n] in wanted)
        kept = (n for n in names if not (alike and known[n].other_rounding))
        return min(kept, key=scores.__getitem__, default=None)

    ours = best("ours")
    rivals = best("today"), best("rival"), best("today", "rival"), best("bound")
    rounding = known[ours].other_rounding if ours else ""
    return Standing(ours, best("ours", alike=True), *rivals, roles, rounding)


def outcome(point: Point, name: str) -> Outcome:
    """That of a variant."""
    return next(one for one in point.outcomes if one.variant == name)


def verdict(
    points: Sequence[Point], standing: Standing, options: Mapping[str, Sequence[str]]
) -> list[str]:
    """Two lines: the best of ours and its options, and how it compares.

    If its rounding is another one than Megatron's it says so, and has the best with Megatron's bits
    beside it.

    Args:
        options: of a launch, by the name of the schedule.
    """
    ours, alike = standing.ours, standing.alike if standing.other_rounding else None
    bound = ""
    if standing.bound is not None:
        bound = (
            f" Ideal bound operator by operator, which nobody can launch: {standing.bound}, "
            f"{_steps(standing.bound, points)}."
        )
    if ours is None:
        first = min(points[0].outcomes, key=lambda one: one.step.typical).variant
        return [
            f"Nothing of ours was simulated: --variants 'commfuse-*' would. Shortest step: "
            f"{first}, {_steps(first, points)}.",
            f"Nothing to compare.{bound}",
        ]

    def steps(name: str) -> list[float]:
        return [outcome(point, name).step.typical for point in points]

    def against(other: str) -> str:
        found = change(steps(ours), steps(other))
        if alike:
            found += f" ({change(steps(alike), steps(other))} with Megatron's bits)"
        return found

    said = []
    if standing.today is not None and standing.today != standing.best:
        today = _steps(standing.today, points)
        said.append(f"{against(standing.today)} than Megatron's order, {today}")
    if standing.best is not None:
        name = f"{standing.best}, the best rival that exists"
        if standing.best == standing.today:
            name = "Megatron's order, which is the best rival that exists"
        said.append(f"{against(standing.best)} than {name}, {_steps(standing.best, points)}")
    if not said:
        said = [f"{against(REFERENCE.name)} than plain collectives"]

    def launched(name: str) -> str:
        layer = ""
        if len(points) == 1:
            layer = f", a layer in {seconds(outcome(points[0], name).layer.typical)}"
        return f"**{name}**, a step in {_steps(name, points)}{layer}: `{' '.join(options[name])}`"

    first = f"Best of ours: {launched(ours)}"
    if standing.other_rounding:
        first += f"; {standing.other_rounding} (other rounding)."
    if alike:
        first += f" With Megatron's bits: {launched(alike)}"
    compared = "; ".join(said)
    return [first, f"{compared[0].upper()}{compared[1:]}.{bound}"]


def change(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """``8.7 % shorter``; over several points from the worst to the best."""
    shares = [one / other - 1 for one, other in zip(ours, theirs, strict=True)]
    worst, best = max(shares), min(shares)

    def said(share: float) -> str:
        return f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'}".replace("%", " %")

    if said(worst) == said(best):
        return said(worst)
    return f"from {said(worst)} to {said(best)}"


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
