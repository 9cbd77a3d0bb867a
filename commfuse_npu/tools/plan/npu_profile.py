"""Evaluates a profile of a training on NPUs: exposed communication, by kind of parallelism.

Reads the ``*_ascend_pt`` folders of ``torch_npu.profiler``, which MindStudio Insight opens. Kernels
and collectives are in kernel_details.csv at levels 0, 1 and 2; trace_view.json, which can have
hundreds of megabytes, is not read. The profiler's own sums are printed beside ours.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.markdown import table_head, table_row

__all__ = ["find_profiles", "plan_profile"]

_OUTPUT, _KERNELS = "ASCEND_PROFILER_OUTPUT", "kernel_details.csv"
_RECORD = (
    "record it with torch_npu.profiler at any level, export type text; in MindSpeed-LLM: --profile "
    "--profile-step-start 15 --profile-step-end 16 --profile-export-type text"
)
_OWN = "Communication(Not Overlapped)", "Computing", "Free"
"""Columns of step_trace_time.csv whose sum is the time of a step."""
_TRANSFERS, _CUBE = {"HCCL", "COMMUNICATION"}, {"AI_CORE", "MIX_AIC", "N/A"}
"""Values of Accelerator Core: transfers; GEMMs and attention, or any kernel at level 0."""
_UNNAMED = "not named"
_FORMS = {
    "--commfuse-fb-overlap": ("tensor", "expert", "context", _UNNAMED),
    "--use-commfuse": ("tensor", "context", _UNNAMED),
}
"""The parallelism that each option can hide. An unnamed group may be any of them: upper bounds."""
_BOUNDS = """
The last two columns are upper bounds, not predictions: min(E, C - O).
- E: exposed communication that the option can hide. With m micro-batches per step \
--commfuse-fb-overlap can hide E (m - 1) / m: the first forward and the last backward are alone.
- C: computing time; for --use-commfuse, of GEMMs and attention. O: the part of C that already \
runs beside this communication.
- No more can be hidden than is computed meanwhile; both are assumed to be as fast together as \
alone. For a prediction: commfuse-npu plan SCRIPT."""

Span = tuple[int, int]
"""Start and end in ns."""


Step = dict[str, Any]
"""A step of one rank, in ms; values are None or empty if the file is missing.

``parts``: exposed by parallelism; two can run at once, so their sum can exceed ``exposed``.
``waiting``: time of collectives beyond that of the fastest rank. ``bounds``: by option.
"""


def find_profiles(folder: Path) -> list[Path]:
    """The rank folders in a folder, or itself.

    Raises:
        UsageError: there are none, or they were recorded, but not analyzed.
    """
    inside = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    profiles = [path for path in inside if (path / _OUTPUT).is_dir()]
    raw = [path for path in inside if path.name.endswith("_ascend_pt")]
    if raw and not profiles:
        raise UsageError(
            f"{raw[0]} has no {_OUTPUT}: it was recorded, but not analysed; python -c 'from "
            f'torch_npu.profiler.profiler import analyse; analyse("{raw[0]}")\''
        )
    if not profiles:
        raise UsageError(
            f"{str(folder)!r} has no profile, *_ascend_pt, in it; {_RECORD}, or give a launch "
            "script"
        )
    return profiles


def plan_profile(folders: Sequence[Path], page: Path | None) -> int:
    """Print the exposed time of each step of each rank, and bounds; returns 0.

    Args:
        page: a file for all results as JSON.

    Raises:
        UsageError: a required file is missing, or has unexpected content.
        OSError: the JSON cannot be written.
    """
    ranks = sorted(map(_Rank, folders), key=lambda rank: (len(rank.name), rank.name))
    if not any(rank.steps for rank in ranks):
        path = folders[0] / _OUTPUT
        why = f"; {path} holds a database" if any(path.glob("*.db")) else ""
        raise UsageError(f"{path / _KERNELS} is missing{why}; {_RECORD}")
    fastest: dict[tuple[str, str], float] = {}
    for key, (_, milliseconds) in chain.from_iterable(rank.times.items() for rank in ranks):
        fastest[key] = min(milliseconds, fastest.get(key, milliseconds))
    steps = [step for rank in ranks for step in rank.steps_with_figures(fastest)]
    print(*_report(steps), sep="\n")
    if page is not None:
        write_json(page, steps, indent=1)
    return 0


class _Rank:
    """The files of one rank.

    ``steps``: spans by step and kind: ``cube``, ``vector``, or the parallelism of a transfer.
    ``times``: from communication.json, parallelism and ms of an operation, by step and name.
    """

    def __init__(self, folder: Path) -> None:
        output = folder / _OUTPUT
        names = [path.stem.rpartition("_")[2] for path in folder.glob("profiler_info_*.json")]
        self.name = names[0] if names else folder.name
        groups = _json(folder / "profiler_metadata.json").get("parallel_group_info", {})
        numbers = {_number(key): _parallelism(entry["group_name"]) for key, entry in groups.items()}
        self.times: dict[tuple[str, str], tuple[str, float]] = {}
        for step, kinds in _json(output / "communication.json").items():
            for name, figures in chain.from_iterable(kind.items() for kind in kinds.values()):
                _, at, group = name.rpartition("@")
                if at:  # a single operation, not the total
                    took = figures["Communication Time Info"]["Elapse Time(ms)"]
                    parallelism = numbers.get(int(group), _UNNAMED)
                    self.times[step.removeprefix("step"), name] = parallelism, took
        sums = _rows(output / "step_trace_time.csv", "Step", *_OWN)
        self._own = {row["Step"]: row for row in sums}
        of_names = {name.partition("@")[0]: kind for (_, name), (kind, _) in self.times.items()}
        self.steps: dict[str, dict[str, list[Span]]] = {}
        columns = "Name", "Accelerator Core", "Start Time(us)", "Duration(us)"
        for row in _rows(output / _KERNELS, *columns):
            name, core, start, lasts = (row[column] for column in columns)
            kind = "cube" if core in _CUBE else "vector"
            if core in _TRANSFERS:
                kind = of_names.get(name) or _of_suffix(name, numbers)
            at = round(Decimal(start.strip()) * 1000)
            spans = self.steps.setdefault(row.get("Step Id", ""), defaultdict(list))
            spans[kind].append((at, at + round(Decimal(lasts.strip()) * 1000)))

    def steps_with_figures(self, fastest: dict[tuple[str, str], float]) -> Iterator[Step]:
        """Each step, with the profiler's own figures."""
        for step in self.steps or self._own:
            waiting: dict[str, float] = defaultdict(float)
            times = {key: time for key, time in self.times.items() if key[0] == step}
            for key, (parallelism, took) in times.items():
                waiting[parallelism] += took - fastest[key]
            sums = [float(self._own[step][name]) / 1000 for name in _OWN if step in self._own]
            yield {
                "rank": self.name,
                "step": step,
                "length": sum(sums) if sums else None,
                "own_exposed": sums[0] if sums else None,
                "own_communication": sum(took for _, took in times.values()) if times else None,
                "waiting": waiting,
                **_exposed(self.steps.get(step)),
            }


def _exposed(spans: dict[str, list[Span]] | None) -> Step:
    """The measured times of a step, and the bounds."""
    if spans is None:
        measured = dict.fromkeys(("computing", "communication", "exposed"))
        return {**measured, "parts": {}, "bounds": {}}
    kernels = [*spans["cube"], *spans["vector"]]
    parts = {name: part for name, part in spans.items() if name not in ("cube", "vector")}
    transfers = list(chain.from_iterable(parts.values()))
    computing = _covered(kernels)
    bounds = {}
    for form, names in _FORMS.items():
        hideable = list(chain.from_iterable(parts.get(name, ()) for name in names))
        beside = spans["cube"] if form == "--use-commfuse" else kernels
        exposed = _covered(kernels + hideable) - computing
        bounds[form] = min(exposed, _covered(beside + hideable) - _covered(hideable))
    return {
        "computing": computing,
        "communication": _covered(transfers),
        "exposed": _covered(kernels + transfers) - computing,
        "parts": {name: _covered(kernels + part) - computing for name, part in parts.items()},
        "bounds": bounds,
    }


def _covered(spans: Sequence[Span]) -> float:
    """Time in ms in which at least one span runs: (A or B) - B is A without B."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def _parallelism(group: str) -> str:
    """The parallelism of a group, by Megatron's or MindSpeed's name: tp, ep_tp, intra_dp_cp, ..."""
    words = set(group.split("_"))
    if "dp" in words:
        return "data"
    if "mp" in words or words >= {"tp", "pp"}:
        return "other"
    marks = {"pp": "pipeline", "embd": "pipeline", "ep": "expert", "exp": "expert", "tp": "tensor",
             "cp": "context", "hcp": "context"}  # fmt: skip
    return next((parallelism for mark, parallelism in marks.items() if mark in words), "other")


def _number(group: str) -> int:
    """The number that msprof writes after @ for an HCCL group: two 32-bit hashes."""
    high = low = 0
    for byte in group.encode():
        high, low = (high * 29 + byte) % 2**32, (low * 131 + byte) % 2**32
    return high << 32 | low


def _of_suffix(name: str, numbers: dict[int, str]) -> str:
    """The parallelism of a kernel by the last digits of its group's number: hcom_..__097_6_1."""
    match = re.search(r"__(\d+)_", name)
    suffix = int(match[1]) if match else -1
    fitting = {kind for number, kind in numbers.items() if number % 1000 == suffix}
    return fitting.pop() if len(fitting) == 1 else _UNNAMED


def _json(path: Path) -> Any:
    """The content of a file; empty if it is missing: level 0 has no communication.json."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}; {_RECORD}") from error


def _rows(path: Path, *needed: str) -> Iterator[dict[str, str]]:
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if lacking := sorted(set(needed) - set(rows.fieldnames or ())):
                raise UsageError(f"{path} has no column {', '.join(lacking)}; {_RECORD}")
            yield from rows


def _report(steps: Sequence[Step]) -> Iterator[str]:
    best = max(steps, key=lambda step: max(step["bounds"].values(), default=0.0))
    form, most = max(best["bounds"].items(), key=lambda bound: bound[1])
    if most < 0.05:
        yield "Nothing to hide: no TP, EP or CP communication is exposed in this profile."
    else:
        length = f" of {best['length']:.1f} ms" if best["length"] else ""
        place = f"rank {best['rank']}, step {best['step']}"
        yield f"{form} can hide at most {most:.1f} ms{length}, {place}."
    yield "\nIn ms. Exposed: a transfer runs and no kernel does; last, the profiler's own sums."
    columns = "length", "computing", "communication", "exposed"
    yield table_head(("rank, step", *columns, "step_trace_time.csv: exposed", "communication.json"))
    for step in steps:
        figures = (_ms(step[name]) for name in (*columns, "own_exposed", "own_communication"))
        yield table_row([f"{step['rank']}, {step['step']}", *figures])
    yield "\nExposed by parallelism; in brackets: spent in waiting for slower ranks among these."
    names = list(dict.fromkeys(name for step in steps for name in step["parts"]))
    yield table_head(("rank, step", *names, *_FORMS))
    for step in steps:
        parts = (
            f"{_ms(step['parts'].get(name))} ({_ms(step['waiting'].get(name))})" for name in names
        )
        bounds = (_ms(step["bounds"].get(form)) for form in _FORMS)
        yield table_row([f"{step['rank']}, {step['step']}", *parts, *bounds])
    yield _BOUNDS
    if _UNNAMED in names:
        yield "- profiler_metadata.json does not name all groups; the others count as E."
    for step in steps:
        why = "is missing" if step["exposed"] is None else "does not hold the whole step"
        own = step["own_exposed"] or 0.0
        if abs((step["exposed"] or 0.0) - own) > 0.02 * own > 0:
            yield f"- Rank {step['rank']}: {_KERNELS} {why}; see the profiler's own sums."


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
