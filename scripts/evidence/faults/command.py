"""Plant faults, see what every rank reports, and judge it.

Exit code 0 if every row is as it has to be, 1 if one is not, 2 for a wrong request.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from scripts.evidence.faults.catalogue import scenarios
from scripts.evidence.faults.finding import Finding, finding_of, table
from scripts.evidence.faults.processes import Player
from scripts.evidence.faults.training import accidents, play_trainings
from scripts.evidence.markdown_section import replace_section

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Play the rows; prints each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one row of each kind")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="rows with one of these texts in their names"
    )
    parser.add_argument("--list", action="store_true", help="print the rows' names and stop")
    args = parser.parse_args(argv)
    chosen = [row for row in scenarios(quick=args.quick) if _wanted(row.name, args.only)]
    trainings = [row for row in accidents(quick=args.quick) if _wanted(row.name, args.only)]
    if not chosen and not trainings:
        parser.error(f"no row has one of {args.only} in its name; see --list")
    if args.list:
        names = [row.name for row in chosen] + [row.name for row in trainings]
        print("\n".join(names))
        return 0
    right = True
    if chosen:
        with Player() as player:
            played = map(player.play, chosen)
            right = _told("faults", map(finding_of, played), args.markdown)
    if trainings:
        right = _told("faults in trainings", play_trainings(trainings), args.markdown) and right
    return 0 if right else 1


def _told(section: str, findings: Iterable[Finding], markdown: Path | None) -> bool:
    """Print each finding when it comes, and write them down; whether all are as they have to be."""
    began = time.monotonic()
    found = [_printed(finding) for finding in findings]
    right = sum(not finding.problems for finding in found)
    took = time.monotonic() - began
    summary = f"{right} of {len(found)} rows are as they have to be; they took {took:.0f} s."
    print(summary)
    if markdown is not None:
        replace_section(markdown, section, f"{_conditions()} {summary}\n\n{table(found)}")
    return right == len(found)


def _wanted(name: str, texts: Sequence[str] | None) -> bool:
    return texts is None or any(text in name for text in texts)


def _printed(finding: Finding) -> Finding:
    print(f"{'ok ' if not finding.problems else 'BAD'} {finding.name}")
    for line in (*finding.reported, *(f"! {problem}" for problem in finding.problems)):
        print(f"      {line}")
    sys.stdout.flush()
    return finding


def _conditions() -> str:
    return (
        f"Measured on CPU with torch {torch.__version__.split('+')[0]}, gloo over loopback, "
        f"{platform.system()}."
    )
