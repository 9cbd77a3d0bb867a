"""Results of an earlier run, from the file that ``--json`` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commfuse_npu.bench.results import Result, Setting
from commfuse_npu.bench.samples import Check

__all__ = ["load"]


def load(path: Path) -> tuple[dict[str, Any], list[Result], list[str]]:
    """What :func:`~commfuse_npu.bench.report.as_json` was given: machine, results, notes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file; the message names what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = dict(found["machine"])
        notes = list(machine.pop("notes"))
        return machine, [_result(row) for row in found["results"]], notes
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not what `commfuse-npu bench --json` writes: {type(error).__name__} {error}"
        ) from error


def _result(row: Mapping[str, Any]) -> Result:
    setting = Setting(
        mode=row["mode"],
        work=row["work"],
        ranks=row["ranks"],
        link=row["link"],
        dtype=row["dtype"],
        ratio=row["ratio"],
        shape=row["shape"],
        bytes_per_second=row["link_bytes_per_second"],
        wire_ms=row["wire_ms"],
    )
    low, high = row["quartiles_ms"]
    check = Check(
        equal=row["bitwise_equal"],
        max_difference=row["max_difference"],
        equal_same_gemms=row["bitwise_equal_same_gemms"],
        peak_bytes=0,
        chosen=tuple(row["chosen"]),
    )
    return Result(
        setting=setting,
        variant=row["variant"],
        median_ms=row["median_ms"],
        quartiles_ms=(low, high),
        compute_ms=row["compute_ms"],
        communication_ms=row["communication_ms"],
        bound_ms=row["bound_ms"],
        exposed_ms=row["exposed_ms"],
        removed=row["overhead_removed_signed"],
        hideable=row["hideable"],
        of_hideable=row["of_hideable"],
        blocked_ms=row["blocked_ms"],
        blocked_removed=row["blocked_removed"],
        speedup=row["speedup"],
        cpu_ms=row["cpu_ms"],
        extra_mib=row["extra_mib"],
        check=check,
        rounds=row["rounds"],
        disturbed_rounds=row["disturbed_rounds"],
        repeated_rounds=row["repeated_rounds"],
    )
