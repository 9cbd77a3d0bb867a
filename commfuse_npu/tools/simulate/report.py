"""A sweep as text: the fastest variants, their launch options, and a table per point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.markdown import percent, table_row
from commfuse_npu.tools.simulate.sweep import Point
from commfuse_npu.tools.simulate.variants import REFERENCE, Role, Variant

__all__ = ["COLUMNS", "Standing", "cells", "headline", "seconds", "sources", "table"]

COLUMNS = "variant", "step", "shorter", "exposed", "tokens/s/NPU", "memory of an NPU"


def sources(hardware: Hardware) -> str:
    """A statement of what the figures are based on."""
    return (
        f"Simulated, not measured. {hardware.assumed} of {hardware.path.name} have no public "
        "source at all; ranges are over its uncertainty."
    )


def seconds(value: float) -> str:
    """``22.13 s``, ``940.1 ms``."""
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.1f} ms"


@dataclass(frozen=True)
class Standing:
    """Comparison of the variants over all points of a sweep."""

    points: Sequence[Point]

    def best(self, *roles: Role, same_bits: bool = False) -> Variant | None:
        """The variant of these roles with the shortest steps, relative to plain, over all points.

        Args:
            same_bits: consider only variants whose results are bitwise equal to Megatron's.
        """
        scores: dict[Variant, float] = {}
        for point in self.points:
            plain = point.outcomes[REFERENCE.name].step.typical
            for outcome in point.outcomes.values():
                other_bits = same_bits and outcome.variant.other_rounding
                if outcome.variant.role in roles and not other_bits:
                    share = outcome.step.typical / plain
                    scores[outcome.variant] = scores.get(outcome.variant, 0.0) + share
        return min(scores, key=scores.__getitem__, default=None)

    @property
    def compared(self) -> dict[str, Variant]:
        """Plain collectives, Megatron's order, and CommFuse's best, by name."""
        ours = self.best("ours", same_bits=True), self.best("ours")
        return {
            form.name: form for form in (REFERENCE, self.best("today"), *ours) if form is not None
        }

    def selected(self, everything: bool) -> list[Variant]:
        """The variants that matter most, or all."""
        wanted = {*self.compared.values(), self.best("rival")}
        variants = [outcome.variant for outcome in self.points[0].outcomes.values()]
        return [variant for variant in variants if everything or variant in wanted]

    def verdict(self, options: Callable[[Variant], str]) -> list[str]:
        """Two lines: the best CommFuse variant with its options, and its comparison with others.

        If its rounding differs from Megatron's, the line says so and adds the best variant with
        Megatron's bits.

        Args:
            options: gives the launch options of a variant.
        """
        ours = self.best("ours")
        if ours is None:
            first = self.best("plain", "today", "rival")
            assert first is not None
            return [
                "Nothing of ours was simulated: --variants 'commfuse-*' would. Shortest step: "
                f"{first.name}, {self._steps(first)}.",
                "Nothing to compare.",
            ]
        exact = self.best("ours", same_bits=True) if ours.other_rounding else None

        def launched(variant: Variant) -> str:
            layer = ""
            if len(self.points) == 1:
                typical = self.points[0].outcomes[variant.name].layer.typical
                layer = f", a layer in {seconds(typical)}"
            return (
                f"**{variant.name}**, a step in {self._steps(variant)}{layer}: `{options(variant)}`"
            )

        def against(other: Variant, name: str) -> str:
            text = self._change(ours, other)
            if exact:
                text += f" ({self._change(exact, other)} with Megatron's bits)"
            return f"{text} than {name}, {self._steps(other)}"

        first_line = f"Best of ours: {launched(ours)}"
        if ours.other_rounding:
            first_line += f"; {ours.other_rounding} (other rounding)."
        if exact:
            first_line += f" With Megatron's bits: {launched(exact)}"
        today, best = self.best("today"), self.best("today", "rival")
        comparisons = []
        if today is not None and today != best:
            comparisons.append(against(today, "Megatron's order"))
        if best is not None:
            name = f"{best.name}, the best alternative that exists"
            if best == today:
                name = "Megatron's order, which is the best alternative that exists"
            comparisons.append(against(best, name))
        compared = "; ".join(comparisons) or against(REFERENCE, "plain collectives")
        return [first_line, f"{compared[0].upper()}{compared[1:]}."]

    def _change(self, ours: Variant, other: Variant) -> str:
        """``8.7 % shorter``; for several points, from the worst to the best."""
        steps = [
            tuple(point.outcomes[form.name].step.typical for form in (ours, other))
            for point in self.points
        ]
        shares = [own / rival - 1 for own, rival in steps]
        worst, best = (
            f"{percent(abs(share))} {'longer' if share > 0 else 'shorter'}"
            for share in (max(shares), min(shares))
        )
        return worst if worst == best else f"from {worst} to {best}"

    def _steps(self, variant: Variant) -> str:
        """``22.13 s (15.34 s .. 36.17 s)``; for several points ``11.02 s to 22.13 s``."""
        steps = [point.outcomes[variant.name].step for point in self.points]
        if len(steps) == 1:
            return steps[0].text(seconds)
        typical = [step.typical for step in steps]
        return f"{seconds(min(typical))} to {seconds(max(typical))}"


def cells(point: Point, variants: Sequence[Variant]) -> list[tuple[str, ...]]:
    """A row per variant, under :data:`COLUMNS`; the shortest one is bold."""
    shown = [point.outcomes[variant.name] for variant in variants]
    best = min(shown, key=lambda outcome: outcome.step.typical).variant
    rows: list[tuple[str, ...]] = []
    for variant in variants:
        outcome = point.outcomes[variant.name]
        name = f"**{variant.name}**" if variant == best else variant.name
        rows.append(
            (
                name,
                outcome.step.text(seconds),
                outcome.shorter.text(percent),
                outcome.exposed.text(seconds),
                outcome.tokens.text("{:.0f}".format),
                f"{outcome.memory / 2**30:.1f} GiB",
            )
        )
    return rows


def headline(point: Point) -> str:
    """The facts that all variants at a point share."""
    return (
        f"sequence {point.sequence}, {point.npus} NPUs, {point.micro_batches} micro-batches; "
        f"communication / computation of a layer, plain: {point.ratio.text('{:.2f}'.format)}"
    )


def table(point: Point, variants: Sequence[Variant]) -> str:
    """A Markdown table of these variants at one point."""
    lines = [f"## {headline(point)}", "", table_row(COLUMNS), "|---" * len(COLUMNS) + "|"]
    lines += map(table_row, cells(point, variants))
    hidden = len(point.outcomes) - len(variants)
    if hidden:
        lines += ["", f"{hidden} more variants were simulated; --all shows them."]
    return "\n".join(lines)
