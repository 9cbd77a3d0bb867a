"""Results as the JSON that ``--json`` writes, and back from it (``--from``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from commfuse_npu.tools.bench.results import Check, Result, Setting
from commfuse_npu.tools.bench.variants import REFERENCE

__all__ = ["as_json", "load"]

_Part = TypeVar("_Part", Setting, Check, Result)

_KEYS = (
    *("work", "ranks", "link", "ratio", "variant", "median_ms", "exposed_ms", "overhead_removed"),
    *("hideable", "mode", "dtype", "shape", "reference", "quartiles_ms"),
    *("overhead_removed_signed", "of_hideable", "blocked_removed", "speedup", "compute_ms"),
    *("communication_ms", "wire_ms", "measured_ratio", "bound_ms", "link_bytes_per_second"),
    *("cpu_ms", "blocked_ms", "extra_mib", "bitwise_equal", "bitwise_equal_same_gemms"),
    *("max_difference", "chosen", "rounds"),
)
"""Of a result, in this order: fields of :class:`Result`, its setting and its check, and more."""

_NAMES = {
    "bytes_per_second": "link_bytes_per_second",
    "removed": "overhead_removed_signed",
    "equal": "bitwise_equal",
    "equal_same_gemms": "bitwise_equal_same_gemms",
}
"""Fields that have another key."""


def as_json(
    machine: Mapping[str, Any], results: Sequence[Result], notes: Sequence[str]
) -> dict[str, Any]:
    """``{"machine": ..., "results": [...]}``.

    ``overhead_removed`` and ``hideable`` are between 0 and 1, clipped; the signed value is
    ``overhead_removed_signed``, ``null`` where the reference had nothing exposed.
    """
    return {
        "machine": {**machine, "notes": list(notes)},
        "results": [_row(result) for result in results],
    }


def _row(result: Result) -> dict[str, Any]:
    of_fields = {**vars(result.setting), **vars(result.check), **vars(result)}
    known = {_NAMES.get(name, name): value for name, value in of_fields.items()}
    known["overhead_removed"] = min(1.0, max(0.0, result.removed or 0.0))
    known["reference"] = REFERENCE
    known["measured_ratio"] = result.setting.wire_ms / result.compute_ms
    return {key: known[key] for key in _KEYS}


def load(path: Path) -> tuple[dict[str, Any], list[Result], list[str]]:
    """What :func:`as_json` was given: machine, results, notes; the peak memory of checks is 0.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file; the message names what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = dict(found["machine"])
        notes = list(machine.pop("notes"))
        return machine, [_result(row) for row in found["results"]], notes
    except KeyError as error:
        raise ValueError(
            f"{path}: not what `commfuse-npu bench --json` writes: there is no {error} in it"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not what `commfuse-npu bench --json` writes: {type(error).__name__} {error}"
        ) from error


def _result(row: Mapping[str, Any]) -> Result:
    setting = _read(Setting, row)
    return _read(Result, row, setting=setting, check=_read(Check, row, peak_bytes=0))


def _read(kind: type[_Part], row: Mapping[str, Any], **known: Any) -> _Part:
    """Refuses what the report could not show: a text for a number, a number that no float holds."""
    hints = get_type_hints(kind)
    for name in (field.name for field in fields(kind) if field.name not in known):
        value = row[_NAMES.get(name, name)]
        known[name] = tuple(value) if get_origin(hints[name]) is tuple else value
        if not _fits(known[name], hints[name]):
            raise TypeError(f"{name} is {str(value)[:80]!r}")
    return kind(**known)


def _fits(value: Any, kind: Any) -> bool:
    options = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = options[:1] * len(value) if options[-1] is ... else options
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if options:
        return any(_fits(value, option) for option in options)
    if kind not in (int, float):
        return isinstance(value, kind)
    numbers = (int, float) if kind is float else int
    return isinstance(value, numbers) and not isinstance(value, bool) and not abs(value) > 1e300
