"""What ``bench --html`` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from commfuse_npu.tools.bench.plot import pictures
from commfuse_npu.tools.bench.report import COLUMNS, LEGEND, about, cells, setting_line
from commfuse_npu.tools.bench.results import Result
from commfuse_npu.tools.bench.standing import of_settings, shown, verdict
from commfuse_npu.tools.report.charts import Table
from commfuse_npu.tools.report.page import Section, environment, write_page

__all__ = ["bench_page"]


def bench_page(
    path: Path,
    words: Sequence[str],
    machine: Mapping[str, Any],
    results: Sequence[Result],
    notes: Sequence[str],
    every: bool,
) -> None:
    """Write the page: the verdict, then a picture and the tables of each group of settings.

    Args:
        words: the command.
        every: of all variants, not of five.
    """
    sections = []
    groups = groupby(results, key=lambda result: result.setting.group)
    for picture, (_, rows) in zip(pictures(results, every), groups, strict=True):
        of_group = list(rows)
        names = {row.variant for row in of_group} if every else shown(of_group)
        tables = [
            Table(COLUMNS, tuple(cells([row for row in found if row.variant in names])),
                  setting_line(setting, found).replace("**", ""))
            for setting, found in of_settings(of_group).items()
        ]  # fmt: skip
        sections.append(Section(picture.title, (), picture, tuple(tables)))
    told = [" ".join(part.split()) for part in re.split(r"\n\n?- |\n\n", LEGEND)]
    sections.append(Section("How to read it", (*told, *notes)))
    facts = environment(words) | {key: "; ".join(lines) for key, lines in about(machine).items()}
    write_page(path, "Overlap benchmark", verdict(results), sections, facts)
