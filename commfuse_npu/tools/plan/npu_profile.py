"""Evaluates a profile of a training on NPUs: exposed communication, by kind of parallelism.

Reads the ``*_ascend_pt`` folders of ``torch_npu.profiler``, which MindStudio Insight opens. Kernels
and collectives are in kernel_details.csv, the groups of collectives in profiler_metadata.json. If
kernel_details.csv has no collectives, step_trace_time.csv has their sums per step.
"""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.terminal import table_head, table_row

_OUTPUT = "ASCEND_PROFILER_OUTPUT"
_KERNELS = "kernel_details.csv"
_STEP_TRACE = "step_trace_time.csv"
_RECORD = (
    "record it with torch_npu.profiler at any level, export type text; in MindSpeed-LLM: --profile "
    "--profile-step-start 15 --profile-step-end 16 --profile-export-type text"
)
_TRANSFERS = {"HCCL", "COMMUNICATION"}
_CUBE = {"AI_CORE", "MIX_AIC", "N/A"}
"""Values of Accelerator Core: transfers; GEMMs and attention, or any kernel at level 0."""
_COMPUTING = {"cube", "vector"}
_UNNAMED = "not named"
_FORMS = {
    "--commfuse-overlap": ("tensor", "expert", "context", _UNNAMED),
    "--use-commfuse": ("tensor", "context", _UNNAMED),
}
"""The parallelism that each option can hide. An unnamed group may be any of them: upper bounds."""
_BOUNDS = """
The last two columns are upper bounds, not predictions: the exposed communication that an option can
hide, and at most what is computed outside of it (for --use-commfuse, GEMMs and attention only).
With m micro-batches per step --commfuse-overlap hides at most (m - 1) / m of it: the first
forward and the last backward are alone. For a prediction: commfuse-npu plan SCRIPT."""

Span = tuple[int, int]
"""Start and end in ns."""


Step = dict[str, Any]
"""A step of one rank, in ms.

``length``: from the first kernel to the end of the last. ``parts``: exposed by parallelism; two can
run at once, so their sum can exceed ``exposed``. ``bounds``: by option. ``source``: the file.
"""


def find_profiles(folder: Path) -> list[Path]:
    """The rank folders in a folder, itself, or the one that it is the output of.

    Raises:
        UsageError: there are none, or none was analyzed.
    """
    if folder.resolve().name == _OUTPUT:
        return [folder.resolve().parent]
    inside = [folder, *sorted(folder.iterdir())]
    profiles = [path for path in inside if (path / _OUTPUT).is_dir()]
    raw = [path for path in inside if any(path.glob("PROF_*"))]
    if not profiles and raw:
        raise UsageError(f"{raw[0]} is not analyzed yet; {_analyze(folder)}")
    if not profiles:
        raise UsageError(f"{str(folder)!r} has no *_ascend_pt with {_OUTPUT} in it; {_RECORD}")
    return profiles


def _analyze(folder: Path) -> str:
    call = f"torch_npu.profiler.profiler.analyse({str(folder)!r}, export_type='text')"
    return f"call {call} where CANN is installed"


def plan_profile(folders: Sequence[Path], page: Path | None) -> int:
    """Print the exposed time of each step of each rank, and bounds; returns 0.

    Args:
        page: a file for all results as JSON.

    Raises:
        UsageError: a required file is missing, or has unexpected content.
    """
    ranks = [(_name(folder), _steps(folder)) for folder in folders]
    steps = [
        {"rank": rank, "step": step, **figures}
        for rank, steps_of in sorted(ranks, key=lambda entry: (len(entry[0]), entry[0]))
        for step, figures in steps_of.items()
    ]
    if not steps:
        raise UsageError(f"{folders[0] / _OUTPUT / _KERNELS} holds no kernel; {_RECORD}")
    print(*_report(steps), sep="\n")
    if page:
        write_json(page, steps, indent=1)
    return 0


def _name(folder: Path) -> str:
    """The number of a rank; the folder's name if there is none."""
    names = [path.stem.rpartition("_")[2] for path in folder.glob("profiler_info_*.json")]
    return names[0] if names else folder.name


def _steps(folder: Path) -> dict[str, Step]:
    """The steps of a rank; a UsageError names a file that is missing or has other content."""
    output = folder / _OUTPUT
    if not (output / _KERNELS).exists():
        databases = ", ".join(sorted(path.name for path in output.glob("*.db")))
        if databases:
            why = f"has no {_KERNELS}, but {databases}: exported as db, which is not read"
            raise UsageError(f"{output} {why}; {_analyze(folder)}")
        raise UsageError(f"{output} has no {_KERNELS}; {_RECORD}")
    try:
        spans_of = _spans(folder)
        if not spans_of or any(spans.keys() - _COMPUTING for spans in spans_of.values()):
            return {step: _figures(spans) for step, spans in spans_of.items()}
        if (output / _STEP_TRACE).exists():
            return _step_trace(output / _STEP_TRACE)
    except Exception as error:  # other or truncated content raises almost any
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{folder} cannot be evaluated: {why}; {_RECORD}") from error
    why = f"{_KERNELS} has no transfers, and there is no {_STEP_TRACE}"
    raise UsageError(f"{output}: {why}; {_RECORD}")


def _spans(folder: Path) -> dict[str, dict[str, list[Span]]]:
    """The spans of a rank, by step and kind: ``cube``, ``vector``, or a transfer's parallelism."""
    steps: dict[str, dict[str, list[Span]]] = {}
    metadata = folder / "profiler_metadata.json"
    content = json.loads(metadata.read_text("utf-8")) if metadata.exists() else {}
    groups = content.get("parallel_group_info", {})
    numbers = {_number(key): _parallelism(of["group_name"]) for key, of in groups.items()}
    with (folder / _OUTPUT / _KERNELS).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            core = row["Accelerator Core"]
            kind = "cube" if core in _CUBE else "vector"
            if core in _TRANSFERS:
                kind = _of_suffix(row["Name"], numbers)
            at = round(Decimal(row["Start Time(us)"].strip()) * 1000)
            until = at + round(Decimal(row["Duration(us)"].strip()) * 1000)
            steps.setdefault(row.get("Step Id", ""), defaultdict(list))[kind].append((at, until))
    return steps


def _step_trace(file: Path) -> dict[str, Step]:
    """The steps of a rank by the sums of torch_npu's own analysis, which are in us."""
    steps: dict[str, Step] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            exposed = float(row["Communication(Not Overlapped)"]) / 1000
            computing = float(row["Computing"]) / 1000
            most = min(exposed, computing - float(row["Overlapped"]) / 1000)
            steps[row["Step"]] = {
                # Stage is without Bubble, the time of receives.
                "length": (float(row["Stage"]) + float(row["Bubble"])) / 1000,
                "computing": computing,
                "communication": float(row["Communication"]) / 1000,
                "exposed": exposed,
                "parts": {_UNNAMED: exposed},
                "bounds": dict.fromkeys(_FORMS, most),
                "source": _STEP_TRACE,
            }
    return steps


def _figures(spans: dict[str, list[Span]]) -> Step:
    """The measured times of a step, and the bounds."""
    kernels = [*spans["cube"], *spans["vector"]]
    parts = {name: part for name, part in spans.items() if name not in _COMPUTING}
    everything = [*kernels, *chain(*parts.values())]
    computing = _covered(kernels)
    bounds = {}
    for form, names in _FORMS.items():
        hideable = [parts.get(name, []) for name in names]
        beside = spans["cube"] if form == "--use-commfuse" else kernels
        exposed = _covered(kernels, *hideable) - computing
        bounds[form] = min(exposed, _covered(beside, *hideable) - _covered(*hideable))
    return {
        "length": (max(end for _, end in everything) - min(everything)[0]) / 1e6,
        "computing": computing,
        "communication": _covered(*parts.values()),
        "exposed": _covered(everything) - computing,
        "parts": {name: _covered(kernels, part) - computing for name, part in parts.items()},
        "bounds": bounds,
        "source": _KERNELS,
    }


def _covered(*spans: Iterable[Span]) -> float:
    """Time in ms in which at least one span runs: (A or B) - B is A without B."""
    total = 0
    end = 0
    for start, stop in sorted(chain(*spans)):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def _parallelism(group: str) -> str:
    """The parallelism of a group, by Megatron's or MindSpeed's name: tp, ep_tp, intra_dp_cp, ..."""
    words = group.split("_")
    # The first counts: of dp_cp, and of ep_tp.
    marks = {"dp": "data", "mp": "other", "pp": "pipeline", "embd": "pipeline", "ep": "expert",
             "exp": "expert", "tp": "tensor", "cp": "context", "hcp": "context"}  # fmt: skip
    return next((parallelism for mark, parallelism in marks.items() if mark in words), "other")


def _number(group: str) -> int:
    """The number that msprof writes after @ for an HCCL group: two 32-bit hashes."""
    high = low = 0
    for byte in group.encode():
        high = (high * 29 + byte) % 2**32
        low = (low * 131 + byte) % 2**32
    return high << 32 | low


def _of_suffix(name: str, numbers: dict[int, str]) -> str:
    """The parallelism of a kernel by the last digits of its group's number: hcom_..__097_6_1."""
    match = re.search(r"__(\d+)_", name)
    suffix = int(match[1]) if match else -1
    fitting = {kind for number, kind in numbers.items() if number % 1000 == suffix}
    return fitting.pop() if len(fitting) == 1 else _UNNAMED


def _report(steps: Sequence[Step]) -> Iterator[str]:
    best = max(steps, key=lambda step: max(step["bounds"].values()))
    form, most = max(best["bounds"].items(), key=lambda bound: bound[1])
    if most < 0.05:
        yield "Nothing to hide: no TP, EP or CP communication is exposed in this profile."
    else:
        place = f"rank {best['rank']}" + (f", step {best['step']}" if best["step"] else "")
        yield f"{form} can hide at most {most:.1f} ms of {best['length']:.1f} ms, {place}."
    traced = dict.fromkeys(step["rank"] for step in steps if step["source"] == _STEP_TRACE)
    if traced:
        yield (
            f"Note: rank {', '.join(traced)}: {_KERNELS} has no transfers. The times are those of "
            f"{_STEP_TRACE}, which does not say whose the transfers are. To know, record the step "
            "at level 1; in MindSpeed-LLM: --profile-level level1."
        )
    yield "\nIn ms. Exposed: a transfer runs and no kernel does; then its parts, and the bounds."
    parts = dict.fromkeys(name for step in steps for name in step["parts"])
    columns = ("length", "computing", "communication", "exposed", *parts, *_FORMS)
    yield table_head(("rank, step", *columns))
    for step in steps:
        figures = step | step["parts"] | step["bounds"]
        row = (f"{figures[name]:.1f}" if name in figures else "-" for name in columns)
        yield table_row([f"{step['rank']}, {step['step']}", *row])
    yield _BOUNDS
