"""One row of the table as it is printed, and the table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scripts.evidence.faults.judge import problems, said
from scripts.evidence.faults.processes import Played

__all__ = ["Finding", "finding_of", "table"]


@dataclass(frozen=True)
class Finding:
    """What came of one fault at one place.

    Attributes:
        reported: per line, who reported what after how long.
        problems: what is wrong with that; empty for a row that is as it has to be.
    """

    name: str
    fault: str
    where: str
    ranks: int
    reported: tuple[str, ...]
    problems: tuple[str, ...]


def finding_of(played: Played) -> Finding:
    """The row of a scenario."""
    scenario = played.scenario
    alike: defaultdict[str, list[tuple[str, float | None]]] = defaultdict(list)
    for report in played.reports:
        planted = " (here)" if report.rank == scenario.faulty else ""
        alike[said(scenario, report)].append((f"{report.rank}{planted}", report.after))
    lines = []
    for text, reporters in alike.items():
        after = [seconds for _, seconds in reporters if seconds is not None]
        took = f", {max(after):.2f} s" if after else ""
        lines.append(f"{', '.join(rank for rank, _ in reporters)}: {text}{took}")
    return Finding(
        scenario.name,
        scenario.fault,
        scenario.where,
        scenario.ranks,
        tuple(lines),
        tuple(problems(played)),
    )


def table(findings: Iterable[Finding]) -> str:
    """As Markdown."""
    head = ["fault", "place", "ranks", "who reported what, after how long", "as it has to be"]
    rows = [
        [
            finding.fault,
            finding.where,
            str(finding.ranks),
            "<br>".join(finding.reported),
            "yes" if not finding.problems else "**no**: " + "; ".join(finding.problems),
        ]
        for finding in findings
    ]
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
