"""Results of an earlier run, from the file that ``--json`` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from commfuse_npu.tools.bench.results import Result, Setting
from commfuse_npu.tools.bench.samples import Check

__all__ = ["load"]


def load(path: Path) -> tuple[dict[str, Any], list[Result], list[str]]:
    """What :func:`~commfuse_npu.tools.bench.report.as_json` was given: machine, results, notes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file; the message names what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = dict(found["machine"])
        notes = list(machine.pop("notes"))
        return machine, [_result(row) for row in found["results"]], notes
    except (KeyError, TypeError, ValueError, RecursionError) as error:
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
    result = Result(
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
    for part in (setting, check, result):
        _check_fields(part)
    return result


def _check_fields(part: Setting | Check | Result) -> None:
    """Refuse what the report could not show: a text for a number, a number that no float holds."""
    kinds = get_type_hints(type(part))
    for one in fields(part):
        value = getattr(part, one.name)
        allowed = get_args(kinds[one.name]) or (kinds[one.name],)
        if isinstance(value, tuple):
            wanted = str if one.name == "chosen" else float
            fits = all(_fits(item, wanted) for item in value)
        else:
            fits = any(_fits(value, kind) for kind in allowed)
        if not fits:
            raise TypeError(f"{one.name} is {str(value)[:80]!r}")


def _fits(value: object, kind: type) -> bool:
    if kind not in (int, float):
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    numbers = (int, float) if kind is float else int
    return isinstance(value, numbers) and not abs(value) > 1e300
