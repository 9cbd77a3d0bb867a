"""One group of processes at work: check, calibrate, and measure ratio by ratio."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from commfuse_npu.tools.bench.programme import LINKS, Sweep
from commfuse_npu.tools.bench.results import (
    Check,
    Result,
    Sample,
    Setting,
    evaluate,
    worst_check,
)
from commfuse_npu.tools.bench.shapes import Shape, bytes_per_pair, default_scale
from commfuse_npu.tools.bench.variants import (
    COMMUNICATION,
    COMPUTE,
    Variant,
    applies_to,
    chosen,
)
from commfuse_npu.tools.ranks import Ranks
from commfuse_npu.tools.tell import tell

__all__ = ["Conditions", "Group"]

_CALIBRATION_ROUNDS = 5
_AS_IT_IS = ("npu", "cuda")
_NOMINAL_RATE = 200e6
"""At which a link is measured before anything else, in bytes per second."""

_COMPUTE = Variant(COMPUTE, "compute")
_COMMUNICATION = Variant(COMMUNICATION, "communication")


@dataclass
class Conditions:
    """What holds for a whole run.

    Attributes:
        notes: filled with what is not as asked.
        wires: filled with what the links were measured to do.
    """

    config: Path
    scale: float | None
    sequence: int | None
    seed: int
    device: str
    timeout: float
    notes: list[str] = field(default_factory=list)
    wires: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say it once."""
        if text not in self.notes:
            self.notes.append(text)


class Group:
    """The ranks of one size.  Use it in a ``with`` block."""

    def __init__(self, ranks: int, conditions: Conditions) -> None:
        self._size = ranks
        self._link = "mesh" if conditions.device == "cpu" else conditions.device
        self._conditions = conditions
        self._stack = ExitStack()

    def __enter__(self) -> Group:
        tell(f"starting {self._size} ranks")
        device, timeout = self._conditions.device, self._conditions.timeout
        with self._stack as stack:
            self._ranks = stack.enter_context(Ranks(self._size, device=device, timeout=timeout))
            self._measure_link()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *what: object) -> None:
        self._stack.close()

    def _measure_link(self) -> None:
        """What the link does at a nominal rate, and without one; may find that it has none."""
        limits: list[float | None] = [None]
        if self._link == "mesh":
            limits.append(_NOMINAL_RATE)
        for limit in limits:
            if not self._pace(limit):
                break
            payload = 4 << 20 if limit is None else int(limit / 20)
            reached, latency = zip(*self._ranks.ask("wire_speed", payload), strict=True)
            of = "" if limit is None else f" of {limit / 1e6:.0f} asked"
            self._conditions.wires.append(
                f"{LINKS[self._link]}, {self._size} ranks: {min(reached) / 1e6:.0f} MB/s per pair "
                f"and direction{of}, {1e6 * max(latency):.0f} us one way"
            )
        self._pace(None)

    def _pace(self, bytes_per_second: float | None) -> bool:
        if self._link == "mesh":
            problems = {p.problem for p in self._ranks.ask("pace", bytes_per_second)} - {""}
            if problems:
                self._link = "unpaced"
                self._conditions.note(
                    f"no rate could be given to the links: {'; '.join(sorted(problems))}. They are "
                    "unpaced, transfers cost the CPU that computes, and only ratio 0 is measured"
                )
                return False
        return True

    def run(self, sweep: Sweep) -> Iterator[Result]:
        """Measure all works of a sweep over this group's link."""
        for work in sweep.works:
            yield from self._run_work(sweep, work)

    def _run_work(self, sweep: Sweep, work: str) -> Iterator[Result]:
        conditions = self._conditions
        scale = conditions.scale or default_scale(work)
        shape = Shape.of_model(conditions.config, self._size, scale, conditions.sequence)
        if conditions.sequence not in (None, shape.sequence):
            conditions.note(
                f"--sequence {conditions.sequence}: {shape.sequence} rows on {self._size} ranks, "
                "where a rank's block is a multiple of 16"
            )
        label = f"{work}, {sweep.ranks} ranks, {sweep.dtype}, {sweep.mode.split(' (')[0]}"
        tell(f"{label}: checking")
        self._pace(None)
        self._ranks.ask("set_up", work, shape, sweep.dtype, conditions.seed, sweep.gflops)
        of_work = [v for v in chosen(sweep.variants, sweep.ranks) if applies_to(v, work)]
        variants = self._that_fit(of_work, shape)
        checks: dict[str, Check] = {}
        fixed = [variant for variant in variants if not variant.tuned]
        for variant in (_COMPUTE, *fixed):
            checks[variant.name] = worst_check(self._ranks.ask("check", variant))
        # It sets the link and is no result: the rounds measure it again.
        alone = self._round([_COMPUTE] * (_CALIBRATION_ROUNDS + 1))[1:]
        compute = statistics.median(sample.total for sample in alone)
        by_name = {v.name: v for v in (_COMPUTE, _COMMUNICATION, *variants)}
        shuffle = random.Random(f"{conditions.seed} {label}")
        on_link = bytes_per_pair(work, shape, self._size, sweep.dtype)

        for ratio in self._possible(sweep.ratios):
            rate = on_link / (ratio * compute) if ratio else None
            self._pace(rate)
            self._ranks.ask("forget_tuning")
            for variant in variants:
                if variant.tuned:
                    tell(f"{label}: ratio {ratio:g}, tuning")
                    checks[variant.name] = worst_check(self._ranks.ask("tune", variant))
            measured: dict[str, list[Sample]] = {name: [] for name in by_name}
            for number in range(sweep.rounds):
                tell(f"{label}: ratio {ratio:g}, round {number + 1} of {sweep.rounds}")
                # Interleaving spreads what drifts (clock rates, other load) over all variants
                # alike; shuffled, none always follows the same neighbour.
                order = list(by_name)
                shuffle.shuffle(order)
                samples = self._round([by_name[name] for name in order])
                for name, sample in zip(order, samples, strict=True):
                    measured[name].append(sample)
            wire_ms = 1e3 * (on_link / rate) if rate else 0.0
            if self._link in _AS_IT_IS:
                # The link is what it is: the ratio is a result.
                there = statistics.median(s.total for s in measured[COMMUNICATION])
                wire_ms, ratio = 1e3 * there, there / compute
            setting = Setting(
                sweep.mode + ("" if sweep.gflops or self._cores_suffice() else ", cores shared"),
                work,
                self._size,
                self._link,
                sweep.dtype,
                ratio,
                str(shape),
                rate,
                wire_ms,
            )
            yield from evaluate(setting, measured, checks)

    def _cores_suffice(self) -> bool:
        return self._link in _AS_IT_IS or (os.cpu_count() or 1) >= self._size

    def _that_fit(self, variants: Sequence[Variant], shape: Shape) -> list[Variant]:
        """Without those that would cut a block into more slices than it has rows."""
        rows = shape.sequence // self._size
        fitting = [v for v in variants if v.slices <= rows]
        if len(fitting) < len(variants):
            self._conditions.note(f"blocks of {rows} rows are too small for some slices")
        return fitting

    def _possible(self, ratios: Sequence[float]) -> Sequence[float]:
        return ratios if self._link == "mesh" else (0.0,)

    def _round(self, order: Sequence[Variant]) -> list[Sample]:
        of_ranks: list[list[Sample]] = self._ranks.ask("round", list(order))
        return [Sample.of_ranks(each) for each in zip(*of_ranks, strict=True)]
