"""One group of processes at work: check, calibrate, and measure ratio by ratio."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from commfuse_npu.tools.bench.disturbance import Load, Watch
from commfuse_npu.tools.bench.processes import Ranks
from commfuse_npu.tools.bench.programme import LINKS, Sweep
from commfuse_npu.tools.bench.progress import Progress
from commfuse_npu.tools.bench.results import Result, Setting, evaluate
from commfuse_npu.tools.bench.rounds import measure
from commfuse_npu.tools.bench.samples import Check, Sample, worst_check
from commfuse_npu.tools.bench.shapes import Shape, bytes_per_pair, default_scale
from commfuse_npu.tools.bench.variants import (
    COMMUNICATION,
    COMPUTE,
    Variant,
    applies_to,
    chosen,
)

__all__ = ["Conditions", "Group", "label_of", "steps_of"]

_CALIBRATION_ROUNDS = 5
_CALIBRATIONS = 4
_FEW_ROUNDS = 2
_QUIET_TRIES, _QUIET_SECONDS = 8, 0.25
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

    def note_left_out(self, what: str) -> None:
        """The time is up before ``what``."""
        self.note(f"not measured, the time was up: {what}; with --rounds there is no limit")


def label_of(sweep: Sweep, work: str) -> str:
    """What is measured, for the progress bar and for what is not as asked."""
    return f"{work}, {sweep.ranks} ranks, {sweep.dtype}, {sweep.mode.split(' (')[0]}"


def steps_of(sweep: Sweep) -> int:
    """Steps of the progress bar: variants checked, and runs in rounds."""
    total = 0
    for work in sweep.works:
        variants = _variants(sweep, work)
        tuned = sum(variant.tuned for variant in variants)
        total += len(variants) - tuned + 1 + len(sweep.ratios) * tuned + _CALIBRATION_ROUNDS
        total += (len(variants) + 2) * len(sweep.ratios) * sweep.rounds
    return total


def _variants(sweep: Sweep, work: str) -> list[Variant]:
    return [v for v in chosen(sweep.variants, sweep.ranks) if applies_to(v, work)]


class Group:
    """The ranks of one size.  Use it in a ``with`` block."""

    def __init__(self, ranks: int, conditions: Conditions, progress: Progress) -> None:
        self._size = ranks
        self._link = "mesh" if conditions.device == "cpu" else conditions.device
        self._conditions = conditions
        self._progress = progress
        self._stack = ExitStack()

    def __enter__(self) -> Group:
        self._progress.say(f"starting {self._size} ranks")
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
        conditions, progress = self._conditions, self._progress
        scale = conditions.scale or default_scale(work)
        shape = Shape.of_model(conditions.config, self._size, scale, conditions.sequence)
        if conditions.sequence not in (None, shape.sequence):
            conditions.note(
                f"--sequence {conditions.sequence}: {shape.sequence} rows on {self._size} ranks, "
                "where a rank's block is a multiple of 16"
            )
        label = label_of(sweep, work)
        if progress.over():
            conditions.note_left_out(label)
            return
        progress.say(f"{label}: checking")
        self._pace(None)
        self._ranks.ask("set_up", work, shape, sweep.dtype, conditions.seed, sweep.gflops)
        variants = self._that_fit(_variants(sweep, work), shape)
        checks: dict[str, Check] = {}
        fixed = [variant for variant in variants if not variant.tuned]
        for variant in (_COMPUTE, *fixed):
            checks[variant.name] = worst_check(self._ranks.ask("check", variant))
            progress.step()
        compute = self._compute_seconds()
        progress.step(_CALIBRATION_ROUNDS)
        by_name = {v.name: v for v in (_COMPUTE, _COMMUNICATION, *variants)}
        shuffle = random.Random(f"{conditions.seed} {label}")
        on_link = bytes_per_pair(work, shape, self._size, sweep.dtype)

        def run(order: Sequence[str]) -> tuple[list[Sample], Load | None]:
            return self._round([by_name[name] for name in order])

        for ratio in self._possible(sweep.ratios):
            if progress.over():
                conditions.note_left_out(f"{label}, ratio {ratio:g}")
                continue
            rate = on_link / (ratio * compute) if ratio else None
            self._pace(rate)
            self._ranks.ask("forget_tuning")
            for variant in variants:
                if variant.tuned:
                    progress.say(f"{label}: ratio {ratio:g}, tuning")
                    checks[variant.name] = worst_check(self._ranks.ask("tune", variant))
                    progress.step()
            progress.say(f"{label}: ratio {ratio:g}")
            rounds = sweep.rounds
            if rounds > _FEW_ROUNDS and progress.late():
                rounds = _FEW_ROUNDS
                conditions.note(f"this machine is slow or busy: only {rounds} rounds now and then")
                progress.step((sweep.rounds - rounds) * len(by_name))
            measured = measure(
                list(by_name),
                rounds,
                run,
                shuffle=shuffle,
                may_repeat=self._may_repeat,
                out_of_time=progress.over,
                after_round=lambda: progress.step(len(by_name)),
            )
            wire_ms = 1e3 * (on_link / rate) if rate else 0.0
            if self._link in _AS_IT_IS:
                # The link is what it is: the ratio is a result.
                alone = statistics.median(s.total for s in measured.samples[COMMUNICATION])
                wire_ms, ratio = 1e3 * alone, alone / compute
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

    def _may_repeat(self) -> bool:
        """Whether there is time for one more round; waits a while for others to be done."""
        for _ in range(_QUIET_TRIES):
            if self._progress.late():
                return False
            watch = Watch()
            time.sleep(_QUIET_SECONDS)
            load = watch.load(0.0)
            if load is None or not load.disturbed:
                break
        return True

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

    def _compute_seconds(self) -> float:
        """Of the computation alone; of several tries that others disturbed the shortest.

        It sets the link and is no result: the rounds measure it again.
        """
        found = []
        while True:
            samples, load = self._round([_COMPUTE] * (_CALIBRATION_ROUNDS + 1))
            found.append(statistics.median(sample.total for sample in samples[1:]))
            if load is None or not load.disturbed or len(found) == _CALIBRATIONS:
                return min(found)

    def _round(self, order: Sequence[Variant]) -> tuple[list[Sample], Load | None]:
        watch = Watch()
        of_ranks: list[tuple[list[Sample], float]] = self._ranks.ask("round", list(order))
        load = watch.load(sum(cpu for _, cpu in of_ranks))
        if load is None:
            self._conditions.note("/proc/stat cannot be read: disturbed rounds are not detected")
        samples = [Sample.of_ranks(each) for each in zip(*(s for s, _ in of_ranks), strict=True)]
        return samples, load
