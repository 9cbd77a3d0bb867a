"""Random cases of all ops, fused against plain, on gloo processes.

With ``--one-device`` each rank besides runs alone, with random delays on every stream.

The same cases for the same seed; without one it is drawn, and printed.  The first case of a group
size that fails is made small and printed as the Python that repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import torch

from scripts.evidence.markdown_section import replace_section
from tests.distributed.ranks import Ranks
from tests.evidence.fuzz.alone import complaints_alone
from tests.evidence.fuzz.campaign import Figures, campaign, failure_of
from tests.evidence.fuzz.case import case_of
from tests.evidence.fuzz.compare import complaints
from tests.one_device.ranks import RanksOfOneDevice

__all__ = ["main", "shares", "table"]

_SHARES = {1: 5, 2: 58, 3: 15, 4: 12, 5: 5, 6: 5}
"""Percent of the cases by group size: most where a case takes least."""

_SHOWN = (
    "op", "dtype", "schedule", "chunks", "taper", "lanes of the transport", "posting", "wgrad",
    "main_grad", "recomputed", "in flight", "micro-batches", "rows of a rank", "input", "weight",
    "gradient",
)  # fmt: skip


@dataclass(frozen=True)
class _Run:
    """What was asked for, and what came of it by group size."""

    seed: int
    one_device: bool
    figures: dict[int, Figures]

    @property
    def failures(self) -> list[str]:
        return [figures.failure for figures in self.figures.values() if figures.failure]


def shares(cases: int) -> dict[int, int]:
    """How many cases each group size gets, all together ``cases``."""
    found = {size: cases * percent // 100 for size, percent in _SHARES.items()}
    found[2] += cases - sum(found.values())
    return found


def table(run: _Run) -> str:
    """The figures in Markdown."""
    total = sum(figures.cases for figures in run.figures.values())
    seconds = sum(figures.seconds for figures in run.figures.values())
    lines = [
        f"`python -m scripts.evidence fuzz --cases {total} --seed {run.seed}"
        f"{' --one-device' if run.one_device else ''}`, CPU, "
        f"{os.cpu_count()} cores, torch {torch.__version__}, hypothesis {hypothesis.__version__}: "
        f"{total} different cases in {seconds:.0f} s, "
        f"{len(run.failures) or 'no'} {'failure' if len(run.failures) == 1 else 'failures'}.",
        "",
        "| ranks | cases | seconds | cases/s | failures |",
        "|---:|---:|---:|---:|---:|",
    ]
    tried: Counter[tuple[str, str]] = Counter()
    for size, figures in run.figures.items():
        rate = figures.cases / max(figures.seconds, 1e-9)
        lines.append(
            f"| {size} | {figures.cases} | {figures.seconds:.0f} | {rate:.1f} | "
            f"{int(bool(figures.failure))} |"
        )
        tried.update(figures.tried)
    lines += [
        "",
        "How often each was tried; a case has up to three layers, or five buckets:",
        "",
        "| what | which, how often |",
        "|---|---|",
    ]
    for what in _SHOWN:
        found = sorted(
            (_in_order(which), which, count) for (of, which), count in tried.items() if of == what
        )
        lines.append(f"| {what} | {', '.join(f'{which} {count}' for _, which, count in found)} |")
    return "\n".join(lines)


def _in_order(which: str) -> tuple[float, str]:
    """Numbers by their value."""
    return (float(which), "") if which.replace(".", "").isdigit() else (0.0, which)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    parser.add_argument(
        "--one-device", action="store_true",
        help="each rank alone, once all ran together",
    )  # fmt: skip
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the figures into its section fuzz"
    )
    parser.add_argument("--case", metavar="PYTHON", help="run this case only, as a failure prints")
    given = parser.parse_args(argv)
    if given.cases < 1:
        parser.error(f"--cases is {given.cases}; give a whole number from 1")
    if given.case is not None:
        try:
            given.case = case_of(given.case)
        except ValueError as error:
            parser.error(f"--case: {error}")
    return given


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the figures; 1 if one failed."""
    given = _arguments(argv)
    kind, compare = (
        (RanksOfOneDevice, complaints_alone) if given.one_device else (Ranks, complaints)
    )
    if given.case is not None:
        group = kind(given.case.size)
        failure = failure_of(group, given.case, compare)
        group.kill()
        print(failure or "fused is plain")
        return int(bool(failure))
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    run = _Run(seed, given.one_device, {})
    for size, cases in shares(given.cases).items():
        if not cases:
            continue
        group = kind(size)
        figures = run.figures[size] = campaign(group, cases, seed, compare)
        group.kill()
        print(
            f"ranks {size}: {figures.cases} cases, {figures.seconds:.0f} s, "
            f"{'a failure' if figures.failure else 'no failure'}",
            flush=True,
        )
        if figures.failure:
            print(figures.failure, flush=True)
    text = table(run)
    print(f"\n{text}")
    if given.markdown is not None:
        replace_section(given.markdown, "fuzz", text)
    return int(bool(run.failures))
