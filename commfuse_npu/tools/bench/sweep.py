"""The quick, full or requested sweeps, and their execution by ranks, ratio by ratio."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from commfuse_npu.tools.bench.results import Check, Result, Sample, Setting, evaluate
from commfuse_npu.tools.bench.shapes import WORKS, Shape
from commfuse_npu.tools.bench.variants import COMMUNICATION, COMPUTE, Variant, chosen
from commfuse_npu.tools.terminal import tell

__all__ = ["LINKS", "Bench", "Conditions", "Sweep", "full", "quick", "with_options"]

LINKS = {
    "mesh": "a link per pair of ranks (paced sockets)",
    "unpaced": "loopback without a rate",
    "npu": "the links between the NPUs",
}
"""Descriptions of the links, by their names in results."""

_CALIBRATION_ROUNDS = 5
_PINGS = 30
_NOMINAL_RATE = 200e6
"""Rate in bytes per second at which a link is first measured."""

_COMPUTE = Variant(COMPUTE, "compute")
_COMMUNICATION = Variant(COMMUNICATION, "communication")

_ASLEEP = 60.0
"""Modeled GFLOPS of a rank with sleeping GEMMs: about one core, so that both modes compare."""

_CROWDED = 15.0
"""The same if ranks share the cores: their Python code and copies are part of the time."""

_SINGLE = ("all-gather", "reduce-scatter")
_OTHERS = ("collective", "coc-?", "slices-?", "megatron*")
_OURS = ("auto*", "ours-c?", "ours-c4-wgrad", "fb-overlap")
_TWO_RANKS = (*_OTHERS, *_OURS, "ours-c4-t2", "ours-c6-t1.5")
_FOUR_RANKS = (*_OTHERS, *_OURS, "ours-c4-t0.5", "ours-c?-l1", "ours-c4-l2")
_EIGHT_RANKS = ("coc-?", "slices-?", "auto", "ours-c?")
_BEST = ("collective", "coc-4", "slices-[48]", "megatron*", "auto*", "ours-c[148]")
"""The best variants of each kind only; lanes differ only with several peers."""


@dataclass(frozen=True)
class Sweep:
    """Workloads that are measured by one group of processes.

    Attributes:
        gflops: let GEMMs sleep, modeled at this speed; ``None`` for real ones.
        variants: patterns of names.
    """

    ranks: int
    works: tuple[str, ...]
    ratios: tuple[float, ...]
    rounds: int
    variants: tuple[str, ...] = ("*",)
    gflops: float | None = None
    dtype: str = "fp32"

    @property
    def mode(self) -> str:
        if self.gflops is None:
            return "real GEMMs"
        return f"sleeping GEMMs ({self.gflops:g} GFLOPS modelled)"


def quick() -> list[Sweep]:
    """Under 3 minutes on 2 cores: the single layers and the MLP, two ratios, few variants."""
    common = ("collective", "coc-4", "slices-4", "megatron*", "ours-c?")
    ratios, two = (0.5, 1.0), (*common, "ours-c6-t1.5")
    return [
        Sweep(2, _SINGLE, ratios, 3, (*two, "auto")),
        Sweep(2, ("mlp",), ratios, 3, two),
        Sweep(2, _SINGLE, ratios, 3, two, _ASLEEP),
        Sweep(4, _SINGLE, ratios, 3, (*common, "auto", "ours-c4-t0.5"), _ASLEEP),
    ]


def full() -> list[Sweep]:
    """Under 25 minutes on 2 cores: everything."""
    ratios = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
    return [
        Sweep(2, _SINGLE, ratios, 7, _TWO_RANKS),
        Sweep(2, ("mlp",), ratios, 5, _TWO_RANKS),
        Sweep(2, ("attention", "layer"), (0.5, 1.0), 3, _BEST),
        Sweep(2, (*_SINGLE, "mlp"), (0.5, 1.0), 3, _BEST, dtype="bf16"),
        Sweep(4, _SINGLE, (0.5, 1.0), 5, _FOUR_RANKS, _ASLEEP),
        Sweep(4, ("mlp",), (0.5, 1.0), 3, _BEST, _CROWDED),
        Sweep(8, _SINGLE, (0.25, 0.5, 1.0, 1.5), 3, _EIGHT_RANKS, _CROWDED),
    ]


def with_options(sweeps: Sequence[Sweep], options: argparse.Namespace) -> list[Sweep]:
    """The sweeps with their values replaced by the options.

    ``ranks``, ``dtypes`` and ``sleep_gemm`` replace all sweeps by variations of the first one, one
    per combination.  The other options replace a value in every sweep.
    """
    chosen = list(sweeps)
    if options.ranks or options.dtypes or options.sleep_gemm is not None:
        model = replace(chosen[0], gflops=options.sleep_gemm)
        chosen = [
            replace(model, ranks=size, dtype=dtype)
            for size in options.ranks or (2,)
            for dtype in options.dtypes or ("fp32",)
        ]
    names = ("works", "ratios", "variants", "rounds")
    changes = {name: getattr(options, name) for name in names if getattr(options, name)}
    # Sweeps that have become equal are measured once.
    return list(dict.fromkeys(replace(sweep, **changes) for sweep in chosen))


@dataclass
class Conditions:
    """The conditions of a whole run.

    Attributes:
        notes: deviations from the request, added during the run.
        machine: facts that a rank reports, added during the run.
        wires: measured rates and latencies of the links, added during the run.
    """

    config: Path
    device: str
    scale: float | None = None
    sequence: int | None = None
    seed: int = 0
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    wires: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class Bench:
    """Ranks that run workloads in every variant.

    Args:
        ask: :meth:`~commfuse_npu.tools.ranks.Ranks.ask` of ranks with
            :class:`~commfuse_npu.tools.measure.worker.Worker`.
        size: number of ranks.
    """

    def __init__(self, ask: Callable[..., list[Any]], size: int, conditions: Conditions) -> None:
        self._ask, self._size, self._conditions = ask, size, conditions
        self._link = "mesh" if conditions.device == "cpu" else conditions.device

    def measure_link(self) -> None:
        """Measure the link unlimited and at a nominal rate; detect if no rate can be set."""
        machine = self._ask("machine")[0]
        self._conditions.machine = {k: machine[k] for k in machine if k not in ("host", "lanes")}
        for limit in (None, _NOMINAL_RATE) if self._link == "mesh" else (None,):
            if not self._pace(limit):
                return
            payload = 4 << 20 if limit is None else int(limit / 20)
            slowest = max(max(times) for times in self._ask("lanes", payload, self._size - 1, 1))
            latency = 1e6 * max(median(times) for times in self._ask("latency", _PINGS) if times)
            nominal = "" if limit is None else f" of {limit / 1e6:.0f} asked"
            self._conditions.wires.append(
                f"{LINKS[self._link]}, {self._size} ranks: {payload / slowest / 1e6:.0f} MB/s per "
                f"pair and direction{nominal}, {latency:.0f} us one way"
            )
        self._pace(None)

    def _pace(self, bytes_per_second: float | None) -> bool:
        if self._link != "mesh":
            return True
        if problems := set(self._ask("pace", bytes_per_second)) - {""}:
            self._link = "unpaced"
            self._conditions.note(
                f"links could not be given a rate: {'; '.join(sorted(problems))}. They are "
                "unpaced, transfers cost the CPU that computes, and only ratio 0 is measured"
            )
        return not problems

    def run(self, sweep: Sweep) -> Iterator[Result]:
        """Run a sweep, workload by workload and ratio by ratio."""
        for work in sweep.works:
            yield from self._run_work(sweep, work)

    def _run_work(self, sweep: Sweep, work: str) -> Iterator[Result]:
        conditions, kind = self._conditions, WORKS[work]
        scale = conditions.scale or kind.scale
        shape = Shape.of_model(conditions.config, self._size, scale, conditions.sequence)
        if conditions.sequence not in (None, shape.sequence):
            conditions.note(
                f"--sequence {conditions.sequence}: {shape.sequence} rows on {self._size} ranks, "
                "where a rank's block is a multiple of 16"
            )
        label = f"{work}, {sweep.ranks} ranks, {sweep.dtype}, {sweep.mode.split(' (')[0]}"
        tell(f"{label}: checking")
        self._pace(None)
        self._ask("set_up", work, shape, sweep.dtype, conditions.seed, sweep.gflops)
        variants = self._that_fit(sweep, work, shape)
        checks = {
            variant.name: Check.of_ranks(self._ask("check", variant))
            for variant in variants
            if not variant.tuned
        }
        # Only to set the link, not as a result: the rounds measure it again.
        calibration = self._round([_COMPUTE] * (_CALIBRATION_ROUNDS + 1))[1:]
        compute = median(sample.total for sample in calibration)
        by_name = {v.name: v for v in (_COMPUTE, _COMMUNICATION, *variants)}
        shuffle = random.Random(f"{conditions.seed} {label}")
        on_link = kind.bytes_per_pair(shape, self._size, sweep.dtype)

        for ratio in sweep.ratios if self._link == "mesh" else (0.0,):
            rate = on_link / (ratio * compute) if ratio else None
            self._pace(rate)
            self._ask("forget_tuning")
            for variant in variants:
                if variant.tuned:
                    tell(f"{label}: ratio {ratio:g}, tuning")
                    checks[variant.name] = Check.of_ranks(self._ask("tune", variant))
            measured: dict[str, list[Sample]] = {name: [] for name in by_name}
            for number in range(sweep.rounds):
                tell(f"{label}: ratio {ratio:g}, round {number + 1} of {sweep.rounds}")
                # Interleaving spreads drift (clock rates, other load) evenly over all variants;
                # shuffling avoids that one always follows the same neighbor.
                order = list(by_name)
                shuffle.shuffle(order)
                samples = self._round([by_name[name] for name in order])
                for name, sample in zip(order, samples, strict=True):
                    measured[name].append(sample)
            wire = on_link / rate if rate else 0.0
            if self._link == "npu":
                # The rate of a real link is fixed, so the ratio is a result.
                wire = median(sample.total for sample in measured[COMMUNICATION])
                ratio = wire / compute
            fields = self._mode(sweep), work, self._size, self._link, sweep.dtype
            setting = Setting(*fields, ratio, str(shape), rate, 1e3 * wire)
            yield from evaluate(setting, measured, checks)

    def _mode(self, sweep: Sweep) -> str:
        few_cores = self._conditions.device == "cpu" and self._size > (os.cpu_count() or 1)
        if few_cores and sweep.gflops is None:
            self._conditions.note(
                f"{self._size} ranks with real GEMMs share {os.cpu_count()} cores: their times "
                "are about sharing, not overlap; use --sleep-gemm"
            )
            return f"{sweep.mode}, cores shared"
        return sweep.mode

    def _that_fit(self, sweep: Sweep, work: str, shape: Shape) -> list[Variant]:
        """The chosen variants, except those with more slices than a block has rows."""
        variants = [v for v in chosen(sweep.variants, sweep.ranks) if v.applies_to(work)]
        rows = shape.sequence // self._size
        fitting = [variant for variant in variants if variant.slices <= rows]
        if len(fitting) < len(variants):
            self._conditions.note(f"blocks of {rows} rows are too small for some slices")
        return fitting

    def _round(self, order: Sequence[Variant]) -> list[Sample]:
        of_ranks = self._ask("round", list(order))
        return [Sample.of_ranks(samples) for samples in zip(*of_ranks, strict=True)]
